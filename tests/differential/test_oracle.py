"""Random rows in company, replayed by transformers with its own processors, position by position."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import hpcdecode
from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.rows import read_rows
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.system.model_path import find_model
from tests.differential.company import Company
from tests.differential.contents import Mix
from tests.differential.mixes import mixes
from tests.differential.oracle import Oracle


def replay(folder: Path, model: str, count: int, number: int, *, chat: bool = False, rows: int = 10) -> int:
    """Run `count` mixes, compare their rows with transformers; returns the number of samples compared."""
    company, oracle, compared = Company(folder, {"it": model}), Oracle(find_model(model, {})), 0

    def check(mix: Mix) -> None:
        nonlocal compared
        company.run(mix)
        with hpcdecode.read(folder / "company.h5") as results:
            for prompt in _prompts(folder, mix, oracle):
                samples = results.samples(prompt.line)
                compared += len(samples)
                found = oracle.problems(prompt, samples) + _structure(prompt, samples)
                assert not found, f"{json.dumps(mix)}\n{found}"

    options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    drawn = given(mixes("it", chat, rows))(check)
    seed(number)(settings(max_examples=count, phases=[Phase.generate], **options)(drawn))()
    return compared


def _prompts(folder: Path, mix: Mix, oracle: Oracle) -> list[Prompt]:
    flags = {name: tuple(v) if isinstance(v, list) else v for name, v in mix["flags"].items()}
    rows = read_rows([str(folder / "company.jsonl")], SamplingParams(**flags))
    context = oracle.model.config.max_position_embeddings
    return [p for p in tokenized(rows, oracle.own, context) if isinstance(p, Prompt)]


def _structure(prompt: Prompt, samples: list[dict]) -> list[str]:
    """Whether texts that came to their end have the structure that the row asks for."""
    asked = prompt.params.structured_outputs or {}
    texts = [s["text"] for s in samples if s["finish_reason"] == "stop" and not prompt.params.stop]
    if "choice" in asked:
        return [text for text in texts if text not in asked["choice"]]
    if "regex" in asked:
        return [text for text in texts if not re.fullmatch(asked["regex"], text)]
    return [text for text in texts if "json" in asked and not isinstance(json.loads(text)["a"], int)]


def test_rows_as_transformers_makes_them(tmp_path):
    assert replay(tmp_path, "demo", 10, 7) > 50


@pytest.mark.full
def test_many_rows_as_transformers_makes_them(tmp_path):
    assert replay(tmp_path, "demo", 300, 8) > 2000


@pytest.mark.full
def test_rows_of_a_real_model(tmp_path, real_model):
    assert replay(tmp_path, str(real_model("smol")), 25, 9, chat=True, rows=6) > 60
