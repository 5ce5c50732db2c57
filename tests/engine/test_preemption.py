"""Rows that give up their room at any step are what they are undisturbed, with all that goes with their tokens."""

from __future__ import annotations

from functools import partial

import pytest

from hpcdecode.engine.kv_swap import KvSwap
from hpcdecode.model import load_split
from hpcdecode.requests.prompt import Prompt
from hpcdecode.system.swap_tiers import FileTier
from tests.support.preemption import hasty_placement
from tests.support.samples import made, rows, run, with_room
from tests.support.swapping import TornTier, chunk_bytes

FIELDS = [
    (70, {"n": 3, "temperature": 0.9, "max_tokens": 12, "logprobs": 1}),
    (64, {"n": 2, "temperature": 1.2, "max_tokens": 9, "prompt_logprobs": 2}),
    (150, {"beam_width": 3, "max_tokens": 8}),
    (130, {"temperature": 0.8, "max_tokens": 14, "repetition_penalty": 1.3, "prompt_logprobs": 1}),
    (20, {"n": 3, "temperature": 0.0, "max_tokens": 6, "logprobs": 0}),
    (90, {"max_tokens": 40, "frequency_penalty": 0.5}),
]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_split(checkpoint("llama3"), dtype="float32")


def prompts():
    """Rows, and as many again that begin as the longest of them does."""
    alone = rows(*FIELDS)
    header = alone[2].token_ids[:128]
    again = [Prompt(p.line + 10, p.id, header + p.token_ids, p.params) for p in rows(*FIELDS)]
    return [*alone, *again]


@pytest.fixture(scope="module")
def undisturbed(model):
    """What the rows are in a KV cache with room for all, by the number of lanes."""
    return with_room(model, prompts)


@pytest.mark.parametrize("rate", [0.2, 0.6])
@pytest.mark.parametrize("lanes", [1, 2])
def test_preempted_rows_are_what_they_are_undisturbed(model, undisturbed, lanes, rate):
    placement = hasty_placement(rate)
    preempted, worker = run(model, prompts(), lanes=lanes, shared=1000, placement=placement, capacity=1024)
    assert (
        sum(s.preemptions for s in worker.schedulers) > 10 and sum(s.preempted_tokens for s in worker.schedulers) > 100
    )
    assert made(preempted) == undisturbed(lanes)
    assert all(s.earlier == 0 and s.times.queued <= s.times.first_token for s in preempted.values())
    assert all(s.preemptions == 0 for s in preempted.values() if s.beams)


def file_swap(kv_cache, folder):
    size = chunk_bytes(kv_cache)
    return KvSwap(kv_cache, [FileTier(str(folder), 1000 * size, size)])


def torn_swap(kv_cache, folder):
    size = chunk_bytes(kv_cache)
    return KvSwap(kv_cache, [TornTier(1000 * size, size)])


@pytest.mark.parametrize("kind", [file_swap, torn_swap])
def test_rows_that_leave_for_a_tier_are_what_they_are_undisturbed(model, undisturbed, tmp_path, kind):
    placement = hasty_placement(0.6)
    sizes = {"lanes": 2, "shared": 1000, "capacity": 1024}
    swapped, worker = run(model, prompts(), placement=placement, tiers=partial(kind, folder=tmp_path), **sizes)
    swaps, counts = worker.schedulers[0].tiers.swaps, worker.links[0].attention.swap.counts
    assert made(swapped) == undisturbed(2)
    assert swaps.moved > 5 and swaps.held == 0
    assert counts.bytes_out > 0 and counts.failures == swaps.failures
    if kind is file_swap:
        assert counts.failures == 0 and counts.bytes_in == counts.bytes_out
        assert not list(tmp_path.iterdir())
    else:
        assert counts.failures > 0
