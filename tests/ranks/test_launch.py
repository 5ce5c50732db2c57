"""Roles and cores of ranks, without starting any; which worlds are refused."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention import cuda as attention_cuda
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.config import EngineOptions
from hpcdecode.engine import room
from hpcdecode.engine.room import measure_room, measure_speeds
from hpcdecode.errors import UserError
from hpcdecode.ranks import launch
from hpcdecode.ranks.layout import assign_roles, groups_of
from hpcdecode.ranks.roles import Rank, assign_cores, assign_devices, sharing_cores
from hpcdecode.ranks.team import Team
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.system.cores import arranged


def ranks(*cpus, host="a"):
    return [Rank(rank=i, host=host, cpus=list(c)) for i, c in enumerate(cpus)]


def roles_of(count, **wishes):
    team = ranks(*[[0]] * count)
    assign_roles(team, Wishes(**wishes))
    return [r.role for r in team]


def pools_of(count, **wishes):
    team = ranks(*[[0]] * count)
    assign_roles(team, Wishes(**wishes))
    return [(group.home, group.pools[0]) for group in groups_of(team)]


def test_roles():
    assert roles_of(1) == ["SR"]
    assert roles_of(3) == roles_of(3, layout="replicas") == ["SR", "SR", "SR"]
    assert roles_of(3, layout="split") == ["S", "R", "R"]
    assert roles_of(4, s_ranks=2) == roles_of(4, layout="split", s_ranks=2) == ["S", "S", "R", "R"]


def test_pools():
    assert pools_of(2) == [(0, [0]), (1, [1])]
    assert pools_of(4, s_ranks=2) == [(0, [2, 3]), (1, [2, 3])]
    assert pools_of(5, s_ranks=2, pools="own") == [(0, [2, 3]), (1, [4])]
    assert pools_of(6, s_ranks=2, pools="own") == [(0, [2, 3]), (1, [4, 5])]
    with pytest.raises(UserError, match="--pools own: expected at least one R-rank for each of 2 S-ranks, got 1"):
        pools_of(3, s_ranks=2, pools="own")


def test_ranks_are_split_if_weights_do_not_fit_on_all_of_a_host():
    def layout(hosts, weights, nodes=None):
        team = [
            Rank(rank=i, host=host, cpus=[0], memory=100, weights=weights, shares_weights=bool(nodes), numa=numa)
            for i, (host, numa) in enumerate(zip(hosts, nodes or [""] * len(hosts), strict=True))
        ]
        return assign_roles(team, Wishes()), [r.role for r in team]

    assert layout("aa", 25) == ("2 replicas, each rank with both roles", ["SR", "SR"])
    why, roles = layout("aa", 26)
    assert why.startswith("one model of 2 ranks, each rank with both roles: weights do not fit on every rank of a")
    assert roles == ["SR", "SR"]
    assert layout("ab", 90)[1] == ["SR", "SR"]
    assert layout("aaaa", 50, ["0", "0", "0", "0"])[1] == ["SR"] * 4  # a NUMA node's ranks have one copy
    assert layout("aaaa", 25, ["0,1"] * 4)[1] == ["SR"] * 4
    assert layout("aaaa", 26, ["0,1"] * 4)[0].startswith("one model of 4 ranks, each rank with both roles: weights do")
    assert layout("aaaa", 91)[0].startswith("1 S + 3 R: weights do not fit on every rank of a")  # not even one copy


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 1),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 3),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"PALS_RANKID": "0"}, 2),
    ],
)
def test_a_process_knows_before_mpi_whether_it_is_alone(monkeypatch, variables, count):
    for name in (*launch._LAUNCHERS, *(name for names in launch._COUNTS.values() for name in names)):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.started() == count


def test_ranks_that_see_a_gpu_are_s_ranks():
    team = ranks([0], [0], [0], [0])
    team[1].gpus, team[3].gpus = ["x"], ["y"]
    assign_roles(team, Wishes())
    assert [r.role for r in team] == ["R", "S", "R", "S"]
    assign_roles(team, Wishes(s_ranks=1))
    assert [r.role for r in team] == ["R", "S", "R", "R"]
    for rank in team:
        rank.gpus = ["x"]
    assign_roles(team, Wishes())
    assert [r.role for r in team] == ["S", "R", "R", "R"]
    for rank in team:
        rank.gpus = list("wxyz")
    assign_roles(team, Wishes())
    assert [r.role for r in team] == ["SR"] * 4


@pytest.mark.parametrize(("count", "s_ranks"), [(1, 2), (2, 2), (3, 4)])
def test_a_world_without_r_rank_is_refused(count, s_ranks):
    with pytest.raises(UserError, match="s-ranks") as caught:
        roles_of(count, s_ranks=s_ranks)
    assert caught.value.everywhere


def test_ranks_that_were_given_the_same_cores_share_them_out():
    team = ranks(range(5), range(5))
    assign_cores(team)
    assert [r.cpus for r in team] == [[0, 1], [2, 3, 4]]
    assert [(r.threads, r.pinned) for r in team] == [(2, True), (3, True)]


def test_ranks_that_were_given_cores_of_their_own_keep_them():
    team = ranks([0, 1], [2, 3])
    assign_cores(team)
    assert [(r.cpus, r.threads, r.pinned) for r in team] == [([0, 1], 2, True), ([2, 3], 2, True)]


def test_more_ranks_than_cores_run_unpinned_on_one_thread_each():
    team = ranks([0, 1], [0, 1], [0, 1])
    assign_cores(team)
    assert [(r.cpus, r.threads, r.pinned) for r in team] == [([0, 1], 1, False)] * 3


def test_cores_of_other_hosts_are_other_cores():
    team = [*ranks([0, 1]), Rank(rank=1, host="b", cpus=[0, 1])]
    assign_cores(team)
    assert [r.threads for r in team] == [2, 2]


@pytest.mark.parametrize(
    ("machines", "cpus", "own"),
    [
        (["x", "y"], [[0, 1], [0, 1]], True),
        (["x", "x"], [[0, 1], [2, 3]], True),
        (["x", "x"], [[0, 1], [0, 1]], False),  # containers of a machine
        (["x", "x"], [[0, 1], [1, 2]], False),
        (["", ""], [[0, 1], [0, 1]], True),
    ],
)
def test_hosts_of_one_machine_may_share_its_cores(machines, cpus, own):
    """Their ranks do not poll for long then."""
    team = [Rank(rank=i, host=f"h{i}", machine=machines[i], cpus=cpus[i]) for i in range(2)]
    assign_cores(team)
    assert all(rank.pinned for rank in team) and sharing_cores(team) == (set() if own else {0, 1})


def test_a_step_of_several_tasks_that_mpi_sees_as_singletons_is_named(monkeypatch):
    for name in launch._LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="--mpi=pmi2"):
        launch.world()


def test_a_process_without_launcher_is_a_world_of_its_own(monkeypatch):
    for name in (*launch._LAUNCHERS, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert launch.world() is None


def placed(roles, gpus, device=None, r_device="cpu"):
    """Devices of ranks of one host, by what they see."""
    seen = zip(roles, gpus, strict=True)
    ranks = [Rank(rank=i, host="a", cpus=[i], gpus=gpus, role=role) for i, (role, gpus) in enumerate(seen)]
    assign_devices(ranks, device, r_device)
    return [" ".join([r.device] * r.has_s + [r.kv_device] * r.has_r) for r in ranks]


def test_ranks_take_the_gpu_that_fewest_have_taken():
    see_three = [["x", "y", "z"]] * 4
    assert placed("SSRR", see_three) == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert placed("SSRR", see_three, "cpu") == ["cpu"] * 4
    assert placed("SSRR", see_three, None, "cuda") == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert placed("SSRR", see_three, "cpu", "cuda") == ["cpu", "cpu", "cuda:0", "cuda:1"]
    assert placed("SR", [["x"], ["y"]], None, "cuda") == ["cuda:0", "cuda:0"]  # each the only one that it sees
    assert placed("SR", [["x", "y"], ["y", "x"]], None, "cuda") == ["cuda:0", "cuda:0"]
    assert placed(["SR"], [["x", "y"]], None, "cuda") == ["cuda:0 cuda:0"]
    assert placed(["SR"], [["x", "y"]], "cpu", "cuda") == ["cpu cuda:0"]
    assert placed(["SR"], [["x"]]) == ["cuda:0 cpu"]


def test_auto_leaves_r_ranks_without_a_gpu_of_their_own_on_cpus():
    assert placed("SRRR", [["x", "y"]] * 4, None, "auto") == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert placed("SRRR", [["x"], ["x"], ["y"], []], None, "auto") == ["cuda:0", "cpu", "cuda:0", "cpu"]
    assert placed("SR", [["x"], ["x"]], None, "auto") == ["cuda:0", "cpu"]
    assert placed(["SR"], [["x"]], None, "auto") == ["cuda:0 cuda:0"]
    assert placed(["SR"], [[]], None, "auto") == ["cpu cpu"]


def assigned(team, wishes, r_device):
    assign_roles(team, wishes)
    assign_devices(team, None, r_device)
    assign_cores(team)


def test_ranks_that_compute_on_gpus_leave_the_cores_to_those_that_do_not():
    team = ranks(*[range(16)] * 3)
    team[0].gpus = ["x"]
    assigned(team, Wishes(), "cpu")
    assert [(r.device, r.kv_device) for r in team] == [("cuda:0", "cpu"), ("cpu", "cpu"), ("cpu", "cpu")]
    assert [r.threads for r in team] == [4, 6, 6]
    assert sorted(c for r in team for c in r.cpus) == list(range(16))
    team = ranks(*[range(16)] * 2)
    for rank in team:
        rank.gpus = ["x", "y"]
    assigned(team, Wishes(s_ranks=1), "cuda")
    assert [len(r.cpus) for r in team] == [8, 8]


@pytest.mark.parametrize(
    ("devices", "rates", "speeds"),
    [
        (["cpu", "cpu", "cpu"], None, [1, 1, 1]),  # alike: not measured
        (["cpu", "cpu", "cuda:0"], [30.0, 50.0, 800.0], [1, 1, 20]),
        (["cuda:1", "cpu", "cuda:0"], [900.0, 50.0, 1100.0], [20, 1, 20]),
    ],
)
def test_r_ranks_that_differ_are_measured_and_those_alike_are_taken_as_equal(monkeypatch, devices, rates, speeds):
    ranks = [Rank(rank=i + 1, host="a", cpus=[i], role="R", kv_device=d, isa="x") for i, d in enumerate(devices)]
    ranks = [Rank(rank=0, host="a", cpus=[9], role="S"), *ranks]
    team = Team(SimpleNamespace(rank=1), ranks)
    monkeypatch.setattr(room, "_read_rate", lambda me: rates[me.rank - 1])
    monkeypatch.setattr(Team, "gather_all", lambda self, value, kind: [0.0, *rates])
    measure_speeds(team)
    assert [r.speed for r in team.ranks] == [1, *speeds] and team.me.speed == speeds[0]


def test_the_rate_of_a_rank_is_that_of_what_it_attends_with():
    cpu = Rank(rank=0, host="a", cpus=arranged(os.sched_getaffinity(0)), role="R")
    assert room._read_rate(cpu) > 1e8
    cpu.kv_device = "cpu:0"  # as a device, emulated
    assert room._read_rate(cpu) > 1e8


def test_gpu_memory_bounds_what_torch_and_the_kv_cache_take_together(monkeypatch):
    """Without a GPU, torch's figures of one: 80 GiB, of which 60 are free and 10 hold weights."""
    limits, gib = [], 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * gib))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    shape = LayerShape(kv_heads=1, k_dim=64, v_dim=64, q_heads=1, scale=1.0)  # 256 bytes a token
    monkeypatch.setattr(
        attention_cuda, "block_bytes", lambda shapes, kv_dtype, block_tokens, device: 256 * block_tokens
    )
    monkeypatch.setattr(attention_cuda, "serves", lambda shapes, kv_dtype, device: shapes[0].v_dim <= 256)

    def room(own: str, kv_dtype: str = "bfloat16", nbytes: int = 256, shape: LayerShape = shape, **flags) -> float:
        """GiB of the KV cache."""
        rank = Rank(rank=0, host="a", cpus=[0], gpus=["x"], role="SR", device=own, kv_device="cuda:0")
        options = EngineOptions(model="", r_device="cuda", **flags)
        setup = SimpleNamespace(shapes_of=lambda rank: [shape], kv_dtype=kv_dtype, block_tokens=64, state_tokens=0)
        measure_room(options, Team(None, [rank]), setup)
        return rank.kv_tokens * nbytes / gib

    assert room("cuda:0") == pytest.approx(60 * 0.7, rel=1e-4) and limits == []
    assert room("cuda:0", gpu_memory=24 * gib) == pytest.approx(14 * 0.7, rel=1e-4)
    assert limits.pop() == pytest.approx((24 - 14 * 0.7) / 80, rel=1e-4)
    assert room("cpu", gpu_memory=24 * gib) == pytest.approx(14 * 0.7, rel=1e-4) and limits == []
    assert room("cuda:0", gpu_memory=24 * gib, kv_memory=20 * gib) == 20
    assert limits.pop() == pytest.approx(4 / 80)
    wide, own = replace(shape, v_dim=512), 64 + 256 + 2 * 2 + 2  # bytes of a token, which torch allocates
    assert room("cuda:0", "k8v4", own, wide, gpu_memory=24 * gib) == pytest.approx(14 * 0.7, rel=1e-4)
    assert limits.pop() == pytest.approx(24 / 80)
    with pytest.raises(UserError, match="no room for a KV cache"):  # the weights alone take more
        room("cuda:0", gpu_memory=8 * gib)


def test_a_rank_that_should_have_a_gpu_and_sees_none_is_named():
    ranks = [Rank(rank=i, host=f"n{i}", cpus=[0], gpus=["x"][i:], role="SR"[i]) for i in range(2)]
    assign_devices(ranks, "cuda", "cpu")
    assert [r.device for r in ranks] == ["cuda:0", "cpu"]
    with pytest.raises(UserError, match="--r-device cuda: rank 1 on n1 sees no GPU"):
        assign_devices(ranks, None, "cuda")
