"""Requests of several samples, run by one S-rank over real slices and a real KV cache."""

from __future__ import annotations

import functools

import numpy as np
import torch

from hpcdecode.attention.open import open_kv_cache, open_layers
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import attention_shapes, state_dtype_of, with_states_as
from hpcdecode.attention.sizes import block_tokens_for, footprint_for
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.kv_swap import chunk_blocks
from hpcdecode.engine.prefill import PromptKvCache, PromptsBeforeChoice
from hpcdecode.engine.resumed import ResumedAttention
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.local import LocalLink
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.speculation import Speculation
from hpcdecode.schedule.swaps import Swaps
from hpcdecode.system.timeline import Timeline
from tests.support.scheduling import ListFeed
from tests.support.swapping import eager


class Sink:
    def __init__(self):
        self.done = []

    def finish(self, request):
        self.done += request.sequences


def rows(*fields):
    draw = np.random.default_rng(3)
    return [
        Prompt(
            line, str(line), draw.integers(5, 200, length).tolist(), SamplingParams(ignore_eos=True, seed=4, **params)
        )
        for line, (length, params) in enumerate(fields, 1)
    ]


def run(
    model,
    prompts,
    *,
    lanes=1,
    batch=8,
    steps=None,
    shared=0,
    placement=Placement,
    capacity=4096,
    tiers=None,
    cache=None,
    beside=False,
    by_torch=False,
    guesses=None,
):
    """The samples that are finished by line and sample, and the worker.

    Args:
        steps: turns of the lanes before it stops.
        tiers: makes a KvSwap of a KV cache.
        cache: makes the KV cache of shapes and a number of slots, in place of one with all in memory.
        beside: prompts attend on the threads of the KV cache, beside it.
        by_torch: they attend by torch's operations, as on a GPU.
        guesses: settings of speculative decoding; None for one token a step.
    """
    ahead = guesses.num_speculative_tokens if guesses else 0
    shapes = with_states_as(model.attends, state_dtype_of(model.attends), ahead)
    limits = LaneLimits(batch, 3, 9, 32, 1024, shared)
    slots = limits.slots
    block_tokens = block_tokens_for(shapes, "float32")
    footprint = footprint_for(shapes, "float32", block_tokens, 0, windowed=not cache, lookahead=ahead)
    if cache:
        store = cache(shapes, slots * lanes)
        capacity = store.capacity_tokens
    else:
        weights = [model.recurrent_weights(i) for i, s in enumerate(shapes) if isinstance(s, RecurrentShape)]
        sizes = {
            "capacity_tokens": capacity,
            "max_sequences": slots * lanes,
            "state_tokens": 0,
            "windowed": True,
            "lookahead": ahead,
        }
        store = open_layers(shapes, weights, kv_dtype="float32", **sizes)
    room, sink, feed, timeline = placement([capacity], footprint, lanes), Sink(), ListFeed(prompts), Timeline()
    sinks = [model.sinks(i) for i in range(len(shapes))]
    part = AttentionWorker(store, sinks, timeline, swap=tiers(store) if tiers else None)
    swaps = eager(Swaps([1000], 64 * chunk_blocks(store.native.block_bytes), [1.0], footprint)) if tiers else None
    guessed = Speculation(guesses, room)
    schedulers = [Scheduler(lane, feed, room, limits, Stops(), swaps, guessed) for lane in range(lanes)]
    links = [LocalLink(part, lane, slots * lane) for lane in range(lanes)]
    attend = attention_shapes(shapes)
    resumed = ResumedAttention(
        lambda tokens: open_kv_cache(attend, kv_dtype="float32", capacity_tokens=tokens, max_sequences=1, team=True),
        attend,
    )
    if by_torch:
        attention, resumed = TorchPromptAttention(attend, torch.float32, torch.device("cpu")), None
    else:
        attention = CpuPromptAttention(attend, dtype="float32", beside=store if beside else None)
        if any(shape.chooses_from is not None for shape in attend):
            attention = PromptsBeforeChoice(attention, attend)
    prompts_attend = PromptKvCache(attention, resumed)
    worker = SRank(model, links, schedulers, sink, Stops(), prompts_attend, timeline)
    turns = 0

    def count():
        nonlocal turns
        turns += 1
        worker.stopping = steps is not None and turns > steps * len(shapes)

    worker.run(count)
    if steps is None:
        part.check()
        assert store.used_tokens == 0 and not worker.prompt_kv.tokens
    return {(s.prompt.line, s.sample): s for s in sink.done}, worker


def made(done):
    """All that the results have of sequences; as text, in which NaN equals NaN."""
    return {key: repr((s.generated, s.finish_reason, s.logprobs, s.prompt_logprobs)) for key, s in done.items()}


def with_room(model, prompts):
    """What is made of `prompts()` in a KV cache with room for all, by the number of lanes; made once for each."""
    return functools.cache(lambda lanes: made(run(model, prompts(), lanes=lanes, shared=1000, capacity=1 << 14)[0]))
