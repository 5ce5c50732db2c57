"""Ranks that only prefill: what the simulator and the planner make of them, against the steps that they spare."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpcdecode.cli import main
from hpcdecode.planning import lengths
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import device
from hpcdecode.planning.layout_planner import GroupWishes, planned_layout
from hpcdecode.planning.layouts import split
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.outcome import Gaps
from hpcdecode.planning.planner import MeanRows
from hpcdecode.planning.simulator import SimulatedGroups, lane_limits, simulate
from hpcdecode.ranks.wishes import GroupShape

SIZE = ModelSize.alike(80, 68_450_000_000, 1_050_000_000, 8192, 1024, 1024, kv_heads=8)
ROWS = lengths.poisson(lengths.fixed(400, 1500, 128), 5.0, 0)


def cost_of(prefill):
    shape = GroupShape(1, 1, 1 + prefill, prefill=prefill > 0)
    return of_devices(SIZE, device("4xh100"), device("epyc-9004"), 5e10, 2e-5, "bfloat16", shape), shape


def simulated(prefill, rows=ROWS, capacity=1 << 20, admission="reserve", schedule="fifo"):
    limits = lane_limits(256, 16, 127, 2, 1 << 20, schedule, 512, apart=prefill > 0)
    return simulate([SimulatedGroups(cost_of(prefill)[0], [capacity] * 8, limits, admission=admission)], rows)


@pytest.mark.parametrize("schedule", ["fifo", "fixed-f", "load-control"])
@pytest.mark.parametrize("prefill", [1, 2])
def test_tokens_come_at_even_gaps_while_others_prefill(prefill, schedule):
    beside, apart = (simulated(count, schedule=schedule) for count in (0, prefill))
    assert apart.rows == beside.rows == len(ROWS) and apart.tokens == beside.tokens
    assert apart.gaps.quantiles()["p99"] < 0.6 * beside.gaps.quantiles()["p99"]
    assert np.nanmedian(apart.latency) < np.nanmedian(beside.latency)
    steps = cost_of(1)[0].body_seconds(1)
    assert apart.gaps.quantiles()["p50"] > 2 * steps  # two lanes


def test_rows_wait_for_a_rank_that_prefills_too_slowly():
    """Twice the prompts that one such rank can take, all at once: it is what a job takes."""
    rows = lengths.fixed(200, 1500, 4)
    cost = cost_of(1)[0]
    least = 200 * 1500 / 512 * cost.prompt_seconds(512, 512 * 750, 1)
    one, two = (simulated(count, rows) for count in (1, 2))
    assert least < one.seconds < 1.3 * least
    assert 0.45 * one.seconds < two.seconds < 0.7 * one.seconds


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_all_rows_end_where_there_is_little_room(admission):
    rows = lengths.lognormal(300, 200, 60, 128, 3)
    found = simulated(1, rows, capacity=2000, admission=admission)
    assert found.rows + found.refused == 300 and found.refused < 10
    assert found.tokens == int(rows.new[np.isfinite(found.latency)].sum())


def test_a_plan_is_bound_by_the_rank_that_prefills():
    rows = MeanRows(1500.0, 100.0)
    plans = {}
    for prefill in (0, 1, 2):
        cost, shape = cost_of(prefill)
        layout = split(cost, 1 << 22, 1 + prefill, 8, shape=shape)
        plans[prefill] = planned_layout(layout, rows, GroupWishes(batches=(256,)))
    assert plans[1].layout.name == "1 S + 1 prefill + 8 R"
    assert plans[1].layout.flags == "--layout split --s-ranks 1 --prefill-ranks 1"
    (beside,), (one,), (two,) = (plans[count].groups for count in (0, 1, 2))
    assert one.bottleneck == "prefill" and one.step.total == one.step.prefill == pytest.approx(2 * two.step.prefill)
    assert one.step.s_rank < beside.step.s_rank and two.tokens_per_second > one.tokens_per_second


def test_quantiles_of_gaps():
    gaps = Gaps()
    assert gaps.quantiles() == {}
    for seconds, rows in ((0.01, 97), (0.5, 3), (0.3, 0), (0.0, 5)):
        gaps.add(seconds, rows)
    assert gaps.quantiles() == {"p50": pytest.approx(0.01, rel=0.004), "p99": pytest.approx(0.5, rel=0.004)}
    assert sum(Gaps.of([gaps, gaps]).counts.values()) == 200


ASKED = ("--s-device", "4xh100", "--fixed", 1500, 64, "--rows", 200, "--link", 400)


def run(*command):
    return main([*map(str, command)])


def test_commands(capsys):
    asked = ("--model", "demo", *ASKED, "--prefill-ranks", 1)
    assert run("simulate", *asked, "--json", "--rate", 4, "--schedule", "fifo") == 0
    assert set(json.loads(capsys.readouterr().out)["gap_seconds"]) == {"p50", "p99"}
    assert run("plan", *asked) == 0
    said = capsys.readouterr().out
    assert "1 S + 1 prefill + " in said and "that only prefill" in said


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--s-ranks", 0), "expected --s-ranks of 1 or more"),
        (("--s-ranks", 2), "expected a multiple of the 2 S-ranks"),
        (("--tp", 2), "got --layout split, --route fixed, --tp 2"),
        (("--layout", "replicas"), "got --layout replicas"),
        (("--schedule", "vllm"), "--prefill-ranks: expected none with --schedule vllm"),
        (("--prefill-ranks", -1), "--prefill-ranks: expected a number >= 0, got -1"),
    ],
)
def test_what_cannot_be_is_refused(capsys, flags, problem):
    assert run("simulate", "--model", "demo", *ASKED, "--prefill-ranks", 1, *flags) == 2
    assert problem in capsys.readouterr().err
