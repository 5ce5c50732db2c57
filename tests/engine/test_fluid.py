"""Rows whose KV cache is larger than its memory are what they are with all in memory."""

from __future__ import annotations

import pytest

from hpcdecode.config import EngineOptions
from hpcdecode.engine.fluid import GroupRotation
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.fluid import gain, step_seconds
from hpcdecode.requests.prompt import Prompt
from tests.support.preemption import HastyPlacement
from tests.support.rotating import file, rotating, sizes_of
from tests.support.samples import rows, run

FIELDS = [
    (70, {"n": 3, "temperature": 0.9, "max_tokens": 12, "logprobs": 1}),
    (150, {"beam_width": 3, "max_tokens": 8}),
    (130, {"temperature": 0.8, "max_tokens": 14, "repetition_penalty": 1.3, "prompt_logprobs": 1}),
    (20, {"n": 3, "temperature": 0.0, "max_tokens": 6, "logprobs": 0}),
    (190, {"max_tokens": 40, "frequency_penalty": 0.5}),
]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_split(checkpoint("llama3"), dtype="float32")


def prompts():
    """Rows, and as many again that begin as the longest but one of them does."""
    alone = rows(*FIELDS)
    header = alone[1].token_ids[:128]
    return [*alone, *(Prompt(p.line + 10, p.id, header + p.token_ids, p.params) for p in rows(*FIELDS))]


def made(done):
    """All that the results have of sequences; as text, in which NaN equals NaN."""
    return {key: repr((s.generated, s.finish_reason, s.logprobs, s.prompt_logprobs)) for key, s in done.items()}


@pytest.mark.parametrize("preempts", [0.0, 0.5])
@pytest.mark.parametrize("lanes", [1, 2])
def test_rows_are_those_of_a_cache_in_memory(model, tmp_path, lanes, preempts):
    """Forks, beams, shared prefixes and chunks of prompts; and, with `preempts`, rows that give up their room."""
    whole, _ = run(model, prompts(), lanes=lanes, shared=1000, capacity=1 << 14)
    caches = []

    def cache(shapes, slots):
        sizes = sizes_of(shapes, "float32", ranges=24 if not preempts else 16, frames=30, blocks=2)
        caches.append(rotating(shapes, "float32", sizes, file(sizes, tmp_path), slots))
        return caches[-1]

    options = {"placement": type("Placement", (HastyPlacement,), {"rate": preempts})} if preempts else {}
    rotated, worker = run(model, prompts(), lanes=lanes, shared=1000, cache=cache, **options)
    assert made(rotated) == made(whole)
    counts = caches[0].pages.counts
    assert counts.bytes_in > 0 and counts.bytes_out > 0
    assert not preempts or sum(s.preemptions for s in worker.schedulers) > 5


def test_it_wins_where_weights_take_long_and_the_link_is_fast():
    weights = Cost(8, [1, 64, 256], [0.1, 0.12, 0.16], [1, 256], [0.0, 0.01], 1e-7, 0.0, 0.0, 0.0, 0.0)
    fast, slow = (GroupRotation(capacity=40_000, resident=10_000, rate=rate) for rate in (1e6, 1e4))
    assert step_seconds(fast, weights, 100, 100.0) == pytest.approx(weights.body_seconds(100), rel=0.05)
    assert step_seconds(slow, weights, 400, 100.0) == pytest.approx(3.0)
    assert gain(fast, weights, 400, 100.0) > 2 and gain(slow, weights, 400, 100.0) < 0.5
    assert gain(fast, weights, 50, 100.0) == pytest.approx(1.0)  # all fit
    tokens = Cost(8, [1, 256], [0.001, 0.256], [1, 256], [0.0, 0.0], 1e-7, 0.0, 0.0, 0.0, 0.0)
    assert gain(fast, tokens, 400, 100.0) < 1.05  # no product takes less time a token for others


def test_it_needs_tiers():
    with pytest.raises(UserError, match=r"--schedule fluid: expected --kv-swap.*got none; add --kv-swap"):
        EngineOptions(model="demo", schedule="fluid").check()
    assert EngineOptions(model="demo", schedule="fluid", kv_swap=("host:1G",)).check().admission == "reserve"
