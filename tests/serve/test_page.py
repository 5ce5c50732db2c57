"""The page at `/`: what it is sent with, and what headless Chromium makes of it, where that is installed."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from hpcdecode import LLM
from hpcdecode.serve.page import policy
from tests.support.batch_servers import BatchServer, lines_of, request
from tests.support.browser import CHROMIUM, Browser

LONG = [request(i, max_tokens=900, ignore_eos=True, n=1, temperature=0) for i in range(60)]
rendered = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", batch=8, kv_memory="16M", threads=1)


@pytest.fixture(scope="module")
def served(llm, tmp_path_factory):
    """A server with the page, and its address."""
    with BatchServer(llm, tmp_path_factory.mktemp("data")) as server:
        yield server, server.url


def test_it_is_static_and_loads_nothing(served):
    _, url = served
    answer = httpx.get(url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    sent = answer.headers["content-security-policy"]
    assert "default-src 'none'" in sent and "unsafe" not in sent and sent == policy(answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"
    source = re.sub(r'"http://www\.w3\.org/2000/svg"', "", answer.text)
    assert "http://" not in source and "https://" not in source and 'src="' not in source
    assert "innerHTML" not in source and "style=" not in source and not re.search(r"\son\w+=", source)
    assert answer.text == httpx.get(url).text


def test_stats(served):
    server, url = served
    found = httpx.get(url + "/stats").json()
    assert found["models"] == ["tiny"] and found["chat"] is True and found["kv"]["capacity"] > 1000
    batch = server.create(lines_of(LONG[:4]))
    server.until(batch)
    deadline = time.monotonic() + 10
    while httpx.get(url + "/stats").json()["tokens"]["generated"] < found["tokens"]["generated"] + 3600:
        assert time.monotonic() < deadline
    after = httpx.get(url + "/stats").json()
    assert after["rows"]["done"] == found["rows"]["done"] + 4 and after["rows"]["running"] == 0


@pytest.mark.system
@rendered
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_it_shows_what_runs(served, tmp_path, width, dark):
    server, url = served
    with Browser(tmp_path / "profile", width, dark) as browser:
        browser.go(url)
        batch = server.create(lines_of(LONG))
        browser.until("document.getElementById('state').textContent.startsWith('Serving for')")
        browser.until("Number(document.getElementById('generated').textContent.replaceAll(',', '')) > 0")
        browser.until("Number(document.getElementById('running').textContent) > 0")
        browser.until("document.querySelectorAll('#speed path').length === 2")
        browser.until(f"document.getElementById('batch-rows').textContent.includes('{batch['id']}')")
        assert browser.text("title") == "tiny" and browser.text("load").endswith(" %")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(UNLABELLED) == [] and browser.run(PALE) == []
        server.client.post(f"/v1/batches/{batch['id']}/cancel")
        server.until(batch)
        browser.until("document.getElementById('batch-rows').textContent.includes('cancelled')")
        browser.picture(tmp_path / "page.png")
        assert browser.complaints == []


@pytest.mark.system
@rendered
def test_a_prompt_is_streamed(served, tmp_path):
    server, url = served
    asked = {"prompt": "Row 1", "max_tokens": 300, "temperature": 0}
    expected = server.client.post("/v1/completions", json={**asked, "model": "tiny"}).json()["choices"][0]
    with Browser(tmp_path / "profile") as browser:
        browser.go(url)
        browser.until("last !== null")
        browser.run("at('prompt').value = 'Row 1', at('kind').value = 'text', at('tokens').value = 300")
        browser.run(
            "window.seen = new Set(), new MutationObserver(() => seen.add(at('answer').textContent.length))"
            ".observe(at('answer'), {childList: true, characterData: true, subtree: true})"
        )
        browser.run("at('run').click()")
        browser.until("at('told').textContent.startsWith('Ended by')")
        assert browser.text("answer") == expected["text"] and browser.run("seen.size") > 3
        assert browser.text("told").startswith(f"Ended by {expected['finish_reason']}, ")
        browser.run("at('kind').value = 'chat', at('tokens').value = 900, at('run').click()")
        browser.until("at('answer').textContent.length > 5")
        browser.run("at('stop').click()")
        browser.until("at('told').textContent === 'Stopped.'")
        browser.until("at('running').textContent === '0'")  # the row is cancelled
        browser.run("model = 'another', at('run').click()")
        browser.until("at('told').className === 'bad'")
        assert "another" in browser.text("told")
        assert all("404" in text for text in browser.complaints)


@pytest.mark.system
@rendered
def test_a_browser_gives_the_key_as_a_password(llm, tmp_path):
    with BatchServer(llm, tmp_path / "data", api_keys=("secret",)) as server, Browser(tmp_path / "profile") as browser:
        assert server.client.get("/stats").status_code == server.client.get("/").status_code == 401
        browser.go(server.url.replace("//", "//anyone:wrong@"))
        assert browser.run("document.getElementById('state')") is None
        browser.go(server.url.replace("//", "//anyone:secret@"))
        browser.until("document.getElementById('state').textContent.startsWith('Serving')")
        browser.run("at('prompt').value = 'Row 1', at('kind').value = 'text', at('run').click()")
        browser.until("at('told').textContent.startsWith('Ended by')")
        assert browser.run("JSON.stringify(localStorage) + document.cookie") == "{}"
        browser.go(server.url)  # which the browser remembers the password of
        browser.until("document.getElementById('state')?.textContent.startsWith('Serving')")


@pytest.mark.system
@rendered
def test_names_are_shown_as_text(served, tmp_path):
    """A model's name with markup in it stays text; a script of the page's own is refused by the policy."""
    _, url = served
    with Browser(tmp_path / "profile") as browser:
        browser.go(url)
        browser.until("last !== null")
        name = "<img src=x onerror=alert(1)>"
        browser.run(f"clearTimeout(timer), show({{...last.stats, models: [{name!r}]}})")
        assert browser.text("title") == name and browser.run("document.images.length") == 0
        assert browser.complaints == []
        browser.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'hit = 1'}))")
        assert browser.run("typeof hit") == "undefined"
        browser.until("true")
        assert any("Content Security Policy" in text for text in browser.complaints)


UNLABELLED = (
    """[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).map(e => e.id)"""
)
PALE = """(() => {  // texts whose contrast with what is behind them is below 4.5
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => { const c = parse(getComputedStyle(e).backgroundColor);
    return c.length === 3 || c[3] ? c : behind(e.parentElement); };
  return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.disabled
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).filter(e => {
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return (a + .05) / (b + .05) < 4.5; }).map(e => e.outerHTML.slice(0, 80));
})()"""
