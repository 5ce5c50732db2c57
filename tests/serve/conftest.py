"""A tiny model, and a server of it in this process."""

from __future__ import annotations

import pytest

from hpcdecode import LLM
from tests.support.served import served


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", batch=8, kv_memory="16M", threads=1)


@pytest.fixture(scope="module")
def server(llm):
    with served(llm) as running:
        yield running
