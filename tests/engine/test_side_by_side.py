"""Jobs whose prompts attend beside decode rows have the tokens of jobs in which one follows the other."""

from __future__ import annotations

import pytest

from hpcdecode.engine import prefill
from hpcdecode.engine.executors import LayeredExecutor, SideBySideExecutor
from hpcdecode.model import load_split
from tests.support.samples import rows, run

PROMPTS = [(5, {"max_tokens": 12}), (90, {"max_tokens": 9, "n": 2, "temperature": 1.0}), (3, {"max_tokens": 1})]
PROMPTS += [(200, {"max_tokens": 6}), (40, {"max_tokens": 12, "temperature": 0.7}), (70, {"max_tokens": 20})]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_split(checkpoint("llama3"), dtype="float32")


def tokens(found):
    return {key: sequence.generated for key, sequence in found.items()}


@pytest.mark.parametrize("lanes", [1, 2])
def test_same_tokens(model, lanes):
    prompts = rows(*PROMPTS)
    apart, worker = run(model, prompts, lanes=lanes)
    assert not any(isinstance(executor, SideBySideExecutor) for executor in worker.executors)
    together, worker = run(model, prompts, lanes=lanes, beside=True)
    assert any(isinstance(executor, SideBySideExecutor) for executor in worker.executors)
    assert tokens(together) == tokens(apart)
    seconds = worker.timeline.shares()
    assert min(seconds["prefill"], seconds["append"], seconds["attend"]) > 0
    assert sum(seconds.values()) == pytest.approx(worker.timeline.seconds())
    line = prompts[3].line
    alone, _ = run(model, [prompts[3]], beside=True)
    assert alone[line, 0].generated == together[line, 0].generated


def test_it_runs_the_steps_with_prompts(model, monkeypatch):
    """Decode rows are beside the first of several calls for prompts."""
    calls, start = [], SideBySideExecutor.start_attention

    def started(self, lane, layer, link, inputs, rows, o):
        calls.append((bool(inputs.parts), inputs.decodes))
        start(self, lane, layer, link, inputs, rows, o)

    monkeypatch.setattr(SideBySideExecutor, "start_attention", started)
    monkeypatch.setattr(prefill, "_PASSING", 1)  # each prompt that comes in one chunk has a call of its own
    together, _ = run(model, rows(*PROMPTS), beside=True)
    assert calls and all(parts for parts, _ in calls) and any(decodes for _, decodes in calls)
    monkeypatch.undo()
    monkeypatch.setattr(SideBySideExecutor, "suits", lambda self, inputs: False)
    apart, worker = run(model, rows(*PROMPTS), beside=True)
    assert isinstance(worker.executors[-1], LayeredExecutor) and tokens(apart) == tokens(together)


def test_skipped_queries_and_windows(checkpoint):
    """The last layer attends from the last tokens of prompts only."""
    model, prompts = load_split(checkpoint("gemma3"), dtype="float32"), rows(*PROMPTS[:4])
    assert tokens(run(model, prompts, beside=True)[0]) == tokens(run(model, prompts)[0])
