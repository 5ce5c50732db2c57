"""Layouts: what is predicted of them against the simulator, which is chosen, and what is said of a cluster."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import msgspec
import pytest

from hpcdecode.cli import main
from hpcdecode.errors import UserError
from hpcdecode.planning import lengths
from hpcdecode.planning.cluster import by_data_sheets
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.hardware import LinkSpeed, device
from hpcdecode.planning.layout_planner import GroupWishes, choose_layout, planned_layout
from hpcdecode.planning.layouts import RanksAlike, layouts_of_like, layouts_of_unlike, replicas, split
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.planner import MeanRows
from hpcdecode.planning.simulator import SimulatedGroups, lane_limits, simulate
from tests.support.profiles import LLAMA_8B_CONFIG

ROWS = MeanRows(prompt=50, steps=128)
SPLIT = Cost(8, [1, 512], [2e-2, 6e-2], [1, 512], [1e-3, 3e-3], 2e-6, 1e-5, 1e-8, 1e-5, 1e-5)
ALONE = msgspec.structs.replace(
    SPLIT, wire_seconds_per_token=0.0, message_latency_seconds=0.0, shared_core_fraction=1.0
)
FAST = msgspec.structs.replace(ALONE, slice_seconds=[5e-3, 1.5e-2], attend_seconds_per_cached_token=5e-7)
CAPACITY = 1 << 20
LIKE = RanksAlike("cpu", 6, ALONE, CAPACITY, CAPACITY)
GPUS = RanksAlike("gpu", 2, FAST, CAPACITY, CAPACITY // 8)
LLAMA_8B = ModelSize.alike(32, 6_980_000_000, 525_000_000, 4096, 1024, 1024)
LLAMA_70B = ModelSize.alike(80, 68_500_000_000, 1_050_000_000, 8192, 1024, 1024)
H100, EPYC = device("h100"), device("epyc-9004")


def simulated(plan, rows):
    """The outcome of so many rows."""
    kinds = []
    for part, group in zip(plan.layout.parts, plan.groups, strict=True):
        prefill = 512 if part.r_ranks else 2048
        limits = lane_limits(group.batch, group.rows.period, 128, group.lanes, 1 << 40, "fixed-f", prefill)
        capacity = [part.capacity] * max(part.r_ranks, 1)
        kinds.append(SimulatedGroups(part.cost, capacity, limits, count=part.count, sharing=part.sharing))
    return simulate(kinds, lengths.fixed(rows, 50, 129))


@pytest.mark.parametrize(
    ("layout", "batch", "lanes"),
    [
        (replicas(replace(LIKE, count=1)), 32, 1),
        (replicas(replace(LIKE, count=5)), 32, 1),
        (split(SPLIT, CAPACITY, 1, 3), 64, 2),
        (split(SPLIT, CAPACITY, 2, 4), 64, 2),
        (split(SPLIT, CAPACITY, 3, 1), 64, 2),
        (split(SPLIT, CAPACITY, 2, 4, "own"), 64, 2),
        (split(SPLIT, CAPACITY, 2, 5, "own"), 64, 2),
        (replicas(GPUS, LIKE), 32, 1),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_layout_reaches_what_is_simulated(layout, batch, lanes):
    plan = planned_layout(layout, ROWS, GroupWishes(batches=(batch,), lanes=(lanes,)))
    short, long = (simulated(plan, n * plan.batch) for n in (3, 7))
    speed = (long.tokens - short.tokens) / (long.seconds - short.seconds)  # without start and end
    assert plan.tokens_per_second == pytest.approx(speed, rel=0.08)


@pytest.mark.parametrize("rows", [128, 512, 2048])
@pytest.mark.parametrize(
    "layout",
    [
        replicas(replace(LIKE, count=4)),
        split(SPLIT, CAPACITY, 1, 3),
        split(SPLIT, CAPACITY, 2, 4),
        split(SPLIT, CAPACITY, 2, 4, "own"),
        replicas(GPUS, LIKE),
    ],
    ids=lambda layout: layout.name,
)
def test_a_number_of_rows_has_a_start_and_an_end(layout, rows):
    """Unlike groups take their last rows at the same time, so that the slow ones end last."""
    plan = planned_layout(layout, replace(ROWS, count=rows))
    assert plan.tokens_per_second == pytest.approx(simulated(plan, rows).tokens_per_second, rel=0.15)


def test_slow_groups_have_few_rows_at_the_end():
    """All groups end within a fifth of the job, though a row takes much longer on the slow ones; B is that of all."""
    plan = planned_layout(replicas(GPUS, LIKE), replace(ROWS, count=1 << 14))
    fast, slow = plan.groups
    assert slow.batch == fast.batch and slow.rows.period == fast.rows.period
    assert slow.step.total > 1.5 * fast.step.total and slow.seconds < 1.2 * fast.seconds


def test_a_layout_is_the_sum_of_its_groups():
    same = GroupWishes(batches=(128,))
    nodes = replace(LIKE, count=5)
    one, five, gpus, mixed = (
        planned_layout(layout, ROWS, same)
        for layout in (replicas(replace(LIKE, count=1)), replicas(nodes), replicas(GPUS), replicas(GPUS, nodes))
    )
    assert five.tokens_per_second == pytest.approx(5 * one.tokens_per_second) and five.batch == 5 * one.batch
    assert mixed.tokens_per_second == pytest.approx(gpus.tokens_per_second + five.tokens_per_second)


@pytest.mark.parametrize("pools", ["shared", "own"])
def test_more_ranks_are_never_slower(pools):
    speeds = {
        (k, p): planned_layout(split(SPLIT, 40_000, k, p, pools), ROWS).tokens_per_second
        for k in (1, 2, 3)
        for p in (3, 4, 6)
    }
    for (k, p), speed in speeds.items():
        assert all(speeds[k, more] >= 0.97 * speed for more in (4, 6) if more > p)
        assert k == 3 or speeds[k + 1, p] >= 0.97 * speed


def test_ranks_that_are_alike_are_replicas_unless_groups_are_nearly_as_fast():
    """(W + A)/N is never more than max(W/K, A/(N-K))."""
    four = replace(LIKE, count=4)
    plans = choose_layout(list(layouts_of_like(four, SPLIT)), ROWS)
    assert plans[0].layout.name == "4 cpu replicas" and plans[0].layout.flags == "--layout replicas"
    assert {plan.layout.family for plan in plans[1:]} == {"split, shared", "split, own"}
    assert all(plan.tokens_per_second <= plans[0].tokens_per_second for plan in plans)
    slow = replace(four, alone=msgspec.structs.replace(ALONE, slice_seconds=[2, 6]))
    assert choose_layout(list(layouts_of_like(slow, SPLIT)), ROWS)[0].layout.family.startswith("split")


def test_few_groups_win_within_three_percent():
    """The R-ranks are the bottleneck by far, so one S-rank is as good as three."""
    attends = msgspec.structs.replace(SPLIT, attend_seconds_per_cached_token=1e-3)
    layouts = list(
        layouts_of_unlike(replace(GPUS, count=3, alone=None), replace(LIKE, alone=None), attends, ("shared",))
    )
    assert {layout.s_ranks for layout in layouts} == {1, 2, 3}
    assert choose_layout(layouts, ROWS)[0].layout.name == "1 S + 6 R"


def test_rows_are_shared_out():
    """Each of many replicas has few rows, and no more sequences than these."""
    plan = planned_layout(replicas(replace(LIKE, count=50)), replace(ROWS, count=500))
    assert plan.groups[0].rows.count == 10 and plan.groups[0].batch <= 10


def test_one_rank_has_one_layout():
    assert [layout.name for layout in layouts_of_like(replace(LIKE, count=1), None)] == ["1 cpu replica"]
    nobody = replace(LIKE, count=0)
    assert [layout.name for layout in layouts_of_unlike(replace(GPUS, count=1), nobody, SPLIT)] == ["1 gpu replica"]
    assert not list(layouts_of_like(replace(LIKE, count=1, alone=None), None))


def test_own_pools():
    layout = split(SPLIT, CAPACITY, 3, 7, "own")
    assert [(part.count, part.r_ranks, part.sharing) for part in layout.parts] == [(3, 2, 1)]
    assert layout.groups == 3 and layout.flags == "--layout split --s-ranks 3 --pools own"
    found = [layout for layout in layouts_of_like(LIKE, SPLIT) if layout.family == "split, own"]
    assert [(layout.s_ranks, layout.r_ranks) for layout in found] == [(2, 4), (3, 3)]


def test_rows_that_fit_into_no_group_are_said(capsys):
    tiny = replace(LIKE, capacity=10, beside=10)
    assert choose_layout(list(layouts_of_like(tiny, SPLIT)), ROWS) == []
    assert main(["plan", "--model", "demo", "--s-ranks", "0", "--r-ranks", "3", "--kv-memory", "10K"]) == 2
    said = capsys.readouterr().err
    assert "room and time for 8 sequences of " in said and "in every group, got none: raise --kv-memory" in said


def cluster(size, s_count, r_count, s=H100):
    return by_data_sheets(size, s, s_count, EPYC, r_count, LinkSpeed(5e10, 1e-5), "bfloat16", 128 << 30)


def test_weights_that_do_not_fit_are_said_with_what_is_needed():
    found = cluster(LLAMA_70B, 4, 16)
    assert [layout.name for layout in found.layouts("auto")] == ["16 epyc-9004 replicas"]
    (why,) = found.refused
    assert "139.1 GB of weights do not fit into 90% of the 80 GB of h100" in why
    assert "or 2 with --tp 2 (69.5 GB each)" in why
    assert not found.layouts("split")
    with pytest.raises(UserError, match="got none: 139"):
        found.layout("replicas", 0, "shared")
    two = cluster(LLAMA_70B, 2, 16, device("2xh100"))
    assert not two.refused and any(layout.name == "2 S + 16 R, pools shared" for layout in two.layouts("split"))


def test_devices_of_one_kind_are_both_roles():
    alike = cluster(LLAMA_8B, 0, 4)
    names = {layout.name for layout in alike.layouts("auto")}
    assert {"4 epyc-9004 replicas", "1 S + 3 R", "2 S + 2 R, pools own", "3 S + 1 R, pools shared"} <= names
    assert alike.layout("split", 2, "own").name == "2 S + 2 R, pools own"
    assert [layout.name for layout in cluster(LLAMA_8B, 4, 0).layouts("auto")] == ["4 h100 replicas"]
    with pytest.raises(UserError, match="expected 1 or more S-ranks, and as many R-ranks, got 3 and 1"):
        alike.layout("split", 3, "own")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The config.json of a model as large as Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG))
    return str(folder)


def test_a_mixed_cluster_is_explained(llama, capsys):
    """4 H100 and 16 CPU nodes: layout, sizes, tokens/s, bottleneck and what else there is, in five lines."""
    machine = ("--s-device", "h100", "--s-ranks", 4, "--r-device", "epyc-9004", "--r-ranks", 16, "--link", 400)
    rows = ("--fixed", 4000, 500, "--rows", 100_000)
    assert main(["plan", "--model", llama, *map(str, (*machine, *rows))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("layout: 4 S + ") and "--layout split --s-ranks 4" in lines[0]
    assert "tokens/s predicted" in lines[0] and re.match(r"each S-rank with \d+ R-ranks.*: --batch ", lines[1])
    assert " --lanes " in lines[1] and "bottleneck: " in lines[1] and "16.1 GB of weights" in lines[2]
    others = ("4 h100 replicas ", "4 h100 + 16 epyc-9004 replicas ", "16 epyc-9004 replicas ", ", pools ")
    assert lines[3].startswith("others: ") and all(other in lines[3] for other in others)
    assert lines[4].startswith("the same with the KV cache in bfloat16: ")
