"""What worlds are compared with."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import Command
from tests.support.worlds import FLAGS, PROMPTS, contents


@pytest.fixture(scope="session")
def alone(tmp_path_factory, forkserver):
    """Rows, topology and summary of one process."""
    command = Command(tmp_path_factory.mktemp("alone"), forkserver)
    result = command("generate", PROMPTS, "-o", "out.h5", *FLAGS)
    assert result.returncode == 0, result.stderr
    return contents(command.directory / "out.h5")


@pytest.fixture
def long_job(hpcdecode, checkpoint, tmp_path):
    """Arguments of a job that runs for minutes."""
    rows = ({"prompt_token_ids": [5 + i % 400] * 4, "max_tokens": 8 + i % 100} for i in range(100_000))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--model", checkpoint("llama3"), "-o", "out.h5", "--ignore-eos", "--dtype", "float32", "--batch", 32)
    flags += ("--checkpoint-every", 1)
    return ("generate", "prompts.jsonl", *flags)
