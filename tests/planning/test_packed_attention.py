"""What threads do with the attention of a step with prompts, against what they do in a run."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import native_shapes
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.bench.mixed import MixedLoad, MixedStep
from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_simulator import simulate_job
from hpcdecode.planning.packed_attention import PackedAttention
from hpcdecode.planning.tiered import TieredMemory, job_group
from hpcdecode.schedule.limits import LaneLimits

SHAPE = LayerShape(kv_heads=2, k_dim=64, v_dim=64, q_heads=4, scale=0.125)
(NATIVE,) = native_shapes([SHAPE], _attn_cpu.LayerShape)
COST = Cost(4, [1, 512], [1e-2, 2e-2], [1, 512], [1e-3, 2e-3], 1e-6, 1e-5, 1e-8, 1e-7, 1e-5)


def played(rows, chunks, threads, *, byte=1e-10, product=1e-11, token=1e-8, together=True):
    return _attn_cpu.play_region(NATIVE, "bfloat16", 64, rows, chunks, threads, byte, product, token, together)


@pytest.mark.parametrize(
    ("rows", "chunks"),
    [
        ((100, 3000, 64, 1500), ((0, 16), (32, 300))),
        ((64,) * 8, ((512, 512), (0, 1))),
        ((2000,) * 6, ((0, 40),) * 3),
    ],
)
def test_items_are_taken_in_the_order_of_a_run(rows, chunks):
    """One thread, with the estimates that the run had."""
    step = MixedStep(SHAPE, MixedLoad("", rows, chunks), 1)
    native = step.prompts.native
    for _ in range(3):
        step.together()
    native.traces = True
    step.together()
    taken = native.items
    byte = max(estimate for kind, _, _, estimate, _ in taken if kind == "attend") - 1e-6
    byte /= max(rows) * bytes_per_token([SHAPE], "bfloat16", step.kv_cache.block_tokens)
    of_first = {token: estimate for kind, group, token, estimate, _ in taken if kind == "prompt" and group == 0}
    last, count = max(of_first), chunks[0][1]
    products = (count - last) * SHAPE.group * sum(chunks[0]) * (SHAPE.k_dim + SHAPE.v_dim)
    product = (of_first[last] - 1e-6) / products
    like = played(rows, chunks, 1, byte=byte, product=product)
    assert [kind for kind, *_ in like] == [kind for kind, *_ in taken]
    estimates = ([e for kind, _, _, e, _ in taken if kind == of] for of in ("attend", "prompt"))
    simulated = ([end - begin for kind, _, begin, end in like if kind == of] for of in ("attend", "prompt"))
    for expected, found in zip(estimates, simulated, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("threads", [1, 2, 7, 64])
def test_no_thread_is_idle_while_work_is_left(threads):
    draw = np.random.default_rng(threads)
    for _ in range(5):
        rows = draw.integers(1, 4000, 32).tolist()
        chunks = [(int(a), int(b)) for a, b in zip(draw.integers(0, 900, 6), draw.integers(1, 900, 6), strict=True)]
        items = played(rows, chunks, threads)
        by_thread = defaultdict(list)
        for kind, thread, begin, end in items:
            by_thread[thread].append((begin, end, kind))
        assert len(by_thread) <= threads
        for own in by_thread.values():
            assert all(a[1] <= b[0] for a, b in pairwise(own))
        work, last = sum(end - begin for _, _, begin, end in items), max(end for *_, end in items)
        longest, packed = (max(e - b for _, _, b, e in items), max(e for k, _, _, e in items if k == "pack"))
        assert work / threads <= last * (1 + 1e-9) and last <= work / threads + longest + packed
        assert min(b for k, _, b, _ in items if k == "prompt") >= packed  # not before K and V are there
        apart = played(rows, chunks, threads, together=False)
        assert sum(e - b for *_, b, e in apart) == pytest.approx(work)
        assert max(e for *_, e in apart) >= last * 0.999


def test_longest_come_first_and_equals_in_order():
    """Rows of one length and one that is longer: its items are begun first."""
    seconds = [end - begin for _, _, begin, end in played([64] * 3 + [64 * 80] + [64] * 3, [], 2)]
    assert len(seconds) > 12 and seconds == pytest.approx(sorted(seconds, reverse=True))
    assert min(seconds[:-6]) > 3 * max(seconds[-6:]) == pytest.approx(3 * min(seconds[-6:]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rows": [0]}, "lengths: expected 1 at least, got 0"),
        ({"chunks": [(-1, 4)]}, "chunks: expected a first token and 1 token at least, got -1 and 4"),
        ({"chunks": [(0, 0)]}, "got 0 and 0"),
        ({"threads": 0}, "threads: expected 1 at least, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(change, expected):
    with pytest.raises(ValueError, match=expected):
        played(**({"rows": [5], "chunks": [(0, 4)], "threads": 2} | change))


def attention_of(threads, together=True):
    return PackedAttention([SHAPE] * 4, "bfloat16", 64, threads, together)


def test_steps_stretch_where_threads_have_nothing_left():
    cost = msgspec.structs.replace(COST, append_seconds_per_prompt_token=1e-7)
    assert attention_of(8).stretch(cost, [], []) == 1.0
    assert attention_of(1).stretch(cost, [900] * 8, [(0, 300)]) == pytest.approx(1.0)
    even = attention_of(8).stretch(cost, [1000] * 64, [(0, 1000)] * 2)
    few = attention_of(8).stretch(cost, [40], [(0, 64)])
    assert 1.0 <= even < 1.1 < few < 8
    assert attention_of(8, together=False).stretch(cost, [1000] * 64, [(0, 1000)] * 2) > even


def test_jobs_take_what_their_attention_stretches_by():
    """The same rows with threads that share attention evenly, and with those that do as jobs have it."""
    memory = TieredMemory([SHAPE] * 4, "bfloat16", 64 << 20, [], False, cores=16)
    cost = Cost(4, [1, 512], [0.0, 0.0], [1, 512], [0.0, 0.0], 1e-7, 0.0, 1e-7, 0.0, 0.0)
    group = job_group(memory, cost, [LaneLimits(8, 1, 31, 256, None)], 0, "reserve", [])
    rows = lengths.fixed(24, 200, 32)
    even = simulate_job(msgspec.structs.replace(group, attention=None), rows)
    found = simulate_job(group, rows)
    assert (found.tokens, found.steps) == (even.tokens, even.steps)
    assert even.seconds * 1.02 < found.seconds < even.seconds * 3
    one = msgspec.structs.replace(group, attention=msgspec.structs.replace(group.attention, threads=1))
    assert simulate_job(one, rows).seconds == pytest.approx(even.seconds, rel=1e-6)
