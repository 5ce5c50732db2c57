"""A server with speculative decoding: the same answers, and all tokens of a stream in their order."""

from __future__ import annotations

import pytest

from hpcdecode import LLM
from tests.support.guessing import guessing
from tests.support.served import joined, served

BODIES = [
    {"prompt": "a b a b a b a b", "max_tokens": 40, "temperature": 0},
    {"prompt": "import os\nimport os\n", "max_tokens": 40, "temperature": 0.4, "seed": 3, "n": 2, "logprobs": 1},
    {"prompt": "def f(x):\n    return x\n\ndef f(x):\n", "max_tokens": 40, "stop": ["return", "ar"], "seed": 5},
]


@pytest.mark.parametrize("how", ["wild", "model"])
def test_answers_and_streams_are_those_without_guesses(checkpoint, how):
    lookups = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
    second = {"model": checkpoint("llama3"), "quantization": "int4"}
    found = []
    for config in (None, lookups if how == "wild" else second):
        llm = LLM(checkpoint("llama3"), dtype="float32", batch=8, kv_memory="16M", threads=1, speculative_config=config)
        with guessing(how, {}), served(llm) as server:
            whole = [server.post("/v1/completions", **body).json()["choices"] for body in BODIES]
            streamed = [joined(server.post("/v1/completions", **body, stream=True)) for body in BODIES]
            tokens = server.client.get("/stats").json()["tokens"]
            assert (0 < tokens["confirmed"] < tokens["drafted"]) if config else tokens["drafted"] == 0
        found.append((whole, streamed))
    assert found[0] == found[1]
