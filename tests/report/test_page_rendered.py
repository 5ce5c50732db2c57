"""The page in headless Chromium, where it is installed: no message in the console, nothing wider than the window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from hpcdecode.report.page.facts import read_facts
from hpcdecode.report.page.write import page
from tests.support.html_pages import write_results
from tests.support.many_ranks import attributes_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>
const seen = [...document.querySelectorAll("svg.chart text")].map(t => t.getBoundingClientRect());
document.body.innerHTML = "<pre>measured " + JSON.stringify({
  wide: document.documentElement.scrollWidth, window: window.innerWidth, texts: seen.length,
  unseen: seen.filter(r => r.width === 0).length }) + "</pre>";
</script>"""

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"), pytest.mark.system]


def rendered(path, width):
    """What Chromium makes of a page: the document, and its log with all messages of the console."""
    own = path.parent / f"profile-{width}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={own}"]
    line = [CHROMIUM, *options, f"--window-size={width},900", "--dump-dom", path.as_uri()]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rendered")
    bad = "<img src=x onerror=alert(1)>" + "w" * 500
    write_results(folder / "r.h5", 40, 5, prompt=bad, texts=bad, ids="i" * 300, **attributes_of(8, 56))
    return page(read_facts(str(folder / "r.h5")))


def test_the_console_stays_empty(tmp_path, source):
    (tmp_path / "run.html").write_text(source)
    log = rendered(tmp_path / "run.html", 1200)
    assert "CONSOLE" not in log.stderr, log.stderr
    assert "<title>r.h5: hpcdecode report</title>" in log.stdout
    probe = source.replace("</body>", "<script>console.error(1)</script></body>")
    (tmp_path / "probe.html").write_text(probe)
    assert "CONSOLE" in rendered(tmp_path / "probe.html", 1200).stderr  # the policy refuses scripts, and says so


@pytest.mark.parametrize("width", [1200, 500])
def test_nothing_is_wider_than_the_window(tmp_path, source, width):
    """A copy without the policy measures itself."""
    copy = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", source).replace(
        "</body>", f"{MEASURE}</body>"
    )
    (tmp_path / "copy.html").write_text(copy)
    measured = json.loads(re.search(r"measured (\{.*?\})", rendered(tmp_path / "copy.html", width).stdout)[1])
    assert measured["wide"] <= measured["window"] == width
    assert measured["texts"] > 50 and measured["unseen"] == 0
