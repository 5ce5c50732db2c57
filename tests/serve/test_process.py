"""`hpcdecode serve` as a process: what it answers, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import threading

import openai
import pytest

pytestmark = pytest.mark.system
ROW = {"prompt": "def f(x):", "temperature": 1.0, "seed": 3, "max_tokens": 60, "ignore_eos": True}


def listening(process):
    """Return the address that a server says; all that it says after that is read, lest it wait."""
    for line in process.stderr:
        if found := re.search(r"serving .* at (http://\S+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return found[1]
    pytest.fail("the server has ended")


def test_it_answers_as_generate_does_and_drains(hpcdecode, checkpoint, tmp_path):
    model = [checkpoint("llama3"), "--dtype", "float32", "--kv-memory", "16M"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    made = hpcdecode("generate", "rows.jsonl", "--model", *model, "-o", "out.h5")
    assert made.returncode == 0, made.stderr
    shown = hpcdecode("export", "out.h5", "--to", "jsonl", "-o", "-")
    expected = json.loads(shown.stdout)["text"]

    hpcdecode.environment["HPCDECODE_API_KEY"] = "secret"
    process = hpcdecode.start("serve", "--model", *model, "--port", 0, "--served-model-name", "tiny")
    try:
        with openai.OpenAI(base_url=listening(process), api_key="secret") as client:
            assert client.completions.create(model="tiny", **body(ROW)).choices[0].text == expected
            long = {**ROW, "max_tokens": 900}
            stream = client.completions.create(model="llama3", **body(long), stream=True)
            text = next(iter(stream)).choices[0].text
            process.send_signal(signal.SIGTERM)
            finished = [chunk.choices[0] for chunk in stream]
            text += "".join(choice.text for choice in finished)
            assert finished[-1].finish_reason == "length" and text.startswith(expected)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def body(row):
    own = {name: value for name, value in row.items() if name != "ignore_eos"}
    return {**own, "extra_body": {"ignore_eos": row["ignore_eos"]}}


def test_what_it_cannot_do_is_said(hpcdecode, checkpoint):
    for flags, message in (
        (("--port", 70000), "--port: expected a number in"),
        (("--ssl-certfile", "nothing.pem"), "--ssl-certfile: expected a certificate"),
        (("--api-key", ""), "--api-key: expected a key"),
    ):
        ended = hpcdecode("serve", "--model", checkpoint("llama3"), *flags)
        assert ended.returncode == 2 and message in ended.stderr, ended.stderr
