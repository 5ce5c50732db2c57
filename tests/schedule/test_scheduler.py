"""The scheduler over many steps with fixed F, without a model: what is in flight, and that no R-rank overflows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hpcdecode.attention.reach import ALL_TOKENS, reach_of
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import choose
from hpcdecode.schedule.spread import Spread, shared_by_pairs
from tests.support.families import FAMILIES, run_families
from tests.support.scheduling import SHAPE, ListFeed, Machine, prompts


@pytest.mark.parametrize(("period", "steps"), [(1, 32), (4, 32), (8, 32), (32, 32)])
def test_steady_load_peaks_at_half_of_the_static_load(period, steps):
    batch = 32
    # A prompt token yields the first token, so a row decodes in max_tokens - 1 steps.
    machine = Machine(
        ListFeed(prompts([(1, steps + 1)] * 200)), batch=batch, period=period, steps=steps, capacity=[10_000]
    ).run()
    steady = machine.loads[3 * steps : 6 * steps]
    # Each sequence also holds its one prompt token.
    assert max(steady) - batch == batch * (steps + period) // 2
    assert all(len(s.generated) == steps + 1 for s in machine.done)


def test_prompts_of_a_period_are_spread_over_its_steps():
    feed = ListFeed(prompts([(40, 33)] * 64))
    machine = Machine(feed, batch=16, period=8, steps=32, capacity=[100_000], prefill_tokens=64).run()
    steady = [p.prefill_tokens for p in machine.steps[40:80]]
    assert set(steady) == {20}  # 4 prompts of 40 tokens over 8 steps


def test_r_ranks_read_about_as_much_in_every_layer():
    draw = np.random.default_rng(0)
    rows = [(int(draw.integers(100, 400)), int(draw.integers(32, 128))) for _ in range(256)]
    feed = ListFeed(prompts(rows))
    machine = Machine(feed, batch=32, period=8, steps=128, capacity=[100_000] * 2, prefill_tokens=4096, lanes=2)
    machine.run().require_empty()
    full = [read for read in machine.reads if sum(n for _, n in read) >= 24]
    slowest = [max(tokens for tokens, _ in read) for read in full]
    mean = [sum(tokens for tokens, _ in read) / 2 for read in full]
    assert np.median(np.divide(slowest, mean)) < 1.05
    placed = {rank for read in full for rank, (_, n) in enumerate(read) if n}
    assert placed == {0, 1}


def test_r_ranks_read_about_as_much_of_windows():
    """Some rows are long, and most layers read the last tokens of them alone."""
    draw = np.random.default_rng(0)
    long = [bool(draw.random() < 0.15) for _ in range(384)]
    ends = {True: (3000, 4000), False: (50, 400)}
    rows = [(int(draw.integers(*ends[is_long])), int(draw.integers(32, 128))) for is_long in long]
    shapes = [SHAPE, *[replace(SHAPE, window=256)] * 5]
    size = {"batch": 64, "period": 8, "steps": 128, "prefill_tokens": 4096, "shapes": shapes}
    by_tokens, by_reads = (
        Machine(ListFeed(prompts(rows)), capacity=[200_000] * 4, reach=reach, **size).run().balance(reach_of(shapes))
        for reach in (ALL_TOKENS, None)
    )
    assert by_tokens < 0.8 and by_reads > 0.87


def test_r_ranks_read_by_their_speeds():
    draw = np.random.default_rng(0)
    rows = [(int(draw.integers(100, 400)), int(draw.integers(32, 128))) for _ in range(256)]
    size = {"batch": 64, "period": 8, "steps": 128, "prefill_tokens": 4096, "lanes": 2}
    speeds = [1.0, 4.0, 1.0]
    machine = Machine(ListFeed(prompts(rows)), capacity=[100_000] * 3, speeds=speeds, **size).run()
    full = [read for read in machine.reads if sum(n for _, n in read) >= 48]
    slowest = [max(tokens / speed for (tokens, _), speed in zip(read, speeds, strict=True)) for read in full]
    best = [sum(tokens for tokens, _ in read) / sum(speeds) for read in full]
    assert np.median(np.divide(slowest, best)) < 1.15


def test_a_slow_r_rank_gets_no_sequence_that_a_fast_one_would_have_done_sooner():
    machine = Machine(
        ListFeed(prompts([(20, 21)] * 24)), batch=12, period=20, steps=20, capacity=[10_000] * 2, speeds=[1.0, 20.0]
    ).run()
    assert {s.rank for s in machine.done} == {1}


def test_a_fast_r_rank_that_is_full_leaves_sequences_to_a_slow_one():
    machine = Machine(
        ListFeed(prompts([(20, 21)] * 24)), batch=12, period=20, steps=20, capacity=[10_000, 41 * 8], speeds=[1.0, 20.0]
    ).run()
    ranks = [s.rank for s in machine.done[:12]]
    assert (ranks.count(0), ranks.count(1)) == (4, 8)


def test_early_ends_are_replaced_at_the_next_injection():
    stops = {(line, 0, 3): 9 for line in range(1, 5)}
    rows = prompts([(1, 33)] * 60)
    for row in rows:
        row.params = SamplingParams(max_tokens=33, ignore_eos=True, stop_token_ids=(9,))
    machine = Machine(ListFeed(rows), batch=8, period=4, steps=32, capacity=[10_000], stops=stops).run()
    assert sorted(s.prompt.line for s in machine.done) == list(range(1, 61))
    assert [s.finish_reason for s in machine.done[:4]] == ["stop"] * 4
    assert max(len(p.decode) for p in machine.steps) == 8


def test_a_row_that_fits_nowhere_is_refused():
    feed = ListFeed(prompts([(10, 5), (90, 20), (10, 5)]))
    machine = Machine(feed, batch=4, period=1, steps=5, capacity=[100, 100]).run()
    assert [s.prompt.line for s in machine.done] == [1, 3]
    assert feed.refused[0][0] == 2 and "kv_memory" in feed.refused[0][1]


def test_sequences_are_spread_over_r_ranks_by_load():
    machine = Machine(ListFeed(prompts([(20, 21)] * 24)), batch=12, period=20, steps=20, capacity=[10_000] * 3).run()
    ranks = [s.rank for s in machine.done[:12]]
    assert sorted(ranks.count(r) for r in range(3)) == [4, 4, 4]


@example(rows=[(1, 22, None), (120, 60, None)], batch=1, period=1, lanes=2, block=1, capacity=[200])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(  # prompt tokens, max_tokens, the position of a stop token
        st.tuples(st.integers(1, 120), st.integers(1, 60), st.none() | st.integers(0, 30)), min_size=1, max_size=40
    ),
    batch=st.integers(1, 12),
    period=st.integers(1, 20),
    lanes=st.integers(1, 3),
    block=st.sampled_from([1, 16]),
    capacity=st.lists(st.integers(200, 600), min_size=1, max_size=3),
)
def test_every_row_is_done_once_and_no_r_rank_overflows(rows, batch, period, lanes, block, capacity):
    stops = {(line, 0, stop): 9 for line, (*_, stop) in enumerate(rows, 1)}
    feed = ListFeed(prompts([row[:2] for row in rows]))
    for row in feed.prompts:
        row.params = SamplingParams(max_tokens=row.params.max_tokens, ignore_eos=True, stop_token_ids=(9,))
    machine = Machine(
        feed, batch=batch, period=period, steps=30, capacity=capacity, block=block, lanes=lanes, stops=stops
    ).run()
    lines = sorted([s.prompt.line for s in machine.done] + [line for line, _ in feed.refused])
    assert lines == list(range(1, len(rows) + 1))
    machine.require_empty()


@settings(max_examples=50, deadline=None)
@given(**FAMILIES)
def test_families_are_done_once_and_no_r_rank_overflows(**case):
    run_families(**case)


@pytest.mark.full
@settings(max_examples=3000, deadline=None)
@given(**FAMILIES)
def test_three_thousand_families(**case):
    run_families(**case)


def test_a_family_is_prefilled_once_and_forked():
    row = Prompt(1, "1", [1] * 40, SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    machine = Machine(ListFeed([row]), batch=3, period=5, steps=5, capacity=[48 + 3 * 16], block=16).run()
    assert sum(p.prefill_tokens for p in machine.steps) == 40
    assert [len(p.fork) for p in machine.steps if len(p.fork)] == [2]
    assert machine.parts[0].peak_tokens == 32 + 3 * 16
    assert [s.sample for s in machine.done] == [0, 1, 2]
    machine.require_empty()


def test_a_prefix_is_prefilled_once_on_every_r_rank():
    rows = [Prompt(i, str(i), [5] * 100 + [i] * 20, SamplingParams(max_tokens=9, ignore_eos=True)) for i in range(40)]
    sizes = {"batch": 8, "period": 4, "steps": 8, "capacity": [600, 600], "block": 16}
    machine = Machine(ListFeed(rows), shared=1000, spread=Spread(common=100), **sizes).run()
    assert sum(p.prefill_tokens for p in machine.steps) == 96 + 40 * (120 - 96)
    assert machine.schedulers[0].shared_tokens == 40 * 96 - 96
    assert sum(len(p.fork) for p in machine.steps) == 40
    machine.require_empty()
    apart = Machine(ListFeed(rows), **sizes).run()
    assert sum(p.prefill_tokens for p in apart.steps) == 40 * 120
    assert max(p.peak_tokens for p in machine.parts) < max(p.peak_tokens for p in apart.parts)


@pytest.mark.parametrize(("prefill_tokens", "fewest"), [(64, 4), (1, 198)])
def test_rows_start_once_what_they_share_is_prefilled(prefill_tokens, fewest):
    """The last row of a micro-batch finds a prefix that the first one would have prefilled alone."""
    ids = list(range(192))
    rows = [Prompt(i, str(i), [*ids, -i, -i, -i], SamplingParams(max_tokens=2, ignore_eos=True)) for i in (1, 2)]
    sizes = {"batch": 2, "period": 1, "steps": 1, "capacity": [1000], "block": 64, "shared": 1000}
    machine = Machine(ListFeed(rows), prefill_tokens=prefill_tokens, **sizes).run()
    machine.require_empty()
    assert [plan.prefill_tokens > 0 for plan in machine.steps] == [True] * fewest + [False] * 2


def test_longer_prefixes_begin_with_shorter_ones():
    def row(i, *runs):
        ids = [token for token, count in runs for _ in range(count)]
        return Prompt(i, str(i), ids, SamplingParams(max_tokens=30, ignore_eos=True))

    rows = [row(i, (5, 64), (6 + i % 2, 64), (100 + i, 9)) for i in range(32)]
    sizes = {"batch": 8, "period": 2, "steps": 16, "capacity": [4000], "block": 16, "prefill_tokens": 512}
    machine = Machine(ListFeed(rows), shared=1000, **sizes).run()
    sent = sum(p.prefill_tokens for p in machine.steps)
    assert sent + machine.schedulers[0].shared_tokens == 32 * 137
    assert sent <= 32 * 9 + 3 * 137 + 3 * 64
    machine.require_empty()


def test_a_family_that_fits_nowhere_is_refused():
    rows = [Prompt(i, "", [1] * 40, SamplingParams(n=n, max_tokens=41, ignore_eos=True)) for i, n in ((1, 4), (2, 9))]
    feed = ListFeed(rows)
    Machine(feed, batch=8, period=5, steps=5, capacity=[32 + 3 * 48], block=16).run()
    assert "lower max_tokens or n" in feed.refused[0][1] and "got 224 (" in feed.refused[0][1]
    assert "expected at most 8" in feed.refused[1][1] and "batch" in feed.refused[1][1]


def test_auto_counts_what_rows_share_once():
    def batch_of(shares, beginnings):
        ids = [[token] * 1000 + [9 + i] * 100 for i, token in enumerate(beginnings)]
        rows = [Prompt(i, "", own, SamplingParams(max_tokens=64, ignore_eos=True)) for i, own in enumerate(ids)]
        return choose(None, None, rows, False, 64, 20_000, shared=sum(shared_by_pairs(rows)) if shares else 0).batch

    alike, apart = [i // 32 for i in range(256)], [i % 8 for i in range(256)]
    assert batch_of(False, alike) == batch_of(False, apart) == batch_of(True, apart) == 18_000 // 1133
    assert batch_of(True, alike) == 18_000 // (1133 - 1000 * 31 // 32)


def test_auto_starts_a_small_job_at_once_and_staggers_a_large_one():
    few, many = prompts([(50, 64)] * 10), prompts([(50, 64)] * 256)
    assert choose(None, None, few, True, 64, 100_000) == (10, 63, 63)
    batch, period, steps = choose(None, None, many, False, 64, 10_000)
    assert (period, steps) == (3, 63)
    assert batch * (50 + (steps + period) / 2) <= 10_000
    assert choose(8, 7, many, False, 64, 10_000)[:2] == (8, 7)
