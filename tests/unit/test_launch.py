"""Roles and cores of ranks, without starting any; which worlds are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpcdecode import attention_cuda, launch
from hpcdecode.attention import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.job import EngineOptions
from hpcdecode.launch import Rank, Team
from hpcdecode.setup import device_of, kv_device_of, measure_room


def ranks(*cpus, host="a"):
    return [Rank(rank=i, host=host, cpus=list(c)) for i, c in enumerate(cpus)]


def roles(count, s_ranks=None):
    team = ranks(*[[0]] * count)
    launch._assign_roles(team, s_ranks)
    return [r.role for r in team]


def test_roles():
    assert roles(1) == ["SR"]
    assert roles(3) == ["S", "R", "R"]
    assert roles(4, s_ranks=2) == ["S", "S", "R", "R"]


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
    team[1].gpus = team[3].gpus = 1
    launch._assign_roles(team, None)
    assert [r.role for r in team] == ["R", "S", "R", "S"]
    launch._assign_roles(team, 1)
    assert [r.role for r in team] == ["R", "S", "R", "R"]
    for rank in team:
        rank.gpus = 1
    launch._assign_roles(team, None)
    assert [r.role for r in team] == ["S", "R", "R", "R"]


@pytest.mark.parametrize(("count", "s_ranks"), [(1, 2), (2, 2), (3, 4)])
def test_a_world_without_r_rank_is_refused(count, s_ranks):
    with pytest.raises(UserError, match="s-ranks") as caught:
        roles(count, s_ranks)
    assert caught.value.everywhere


def test_ranks_that_were_given_the_same_cores_share_them_out():
    team = ranks(range(5), range(5))
    launch._assign_cores(team)
    assert [r.cpus for r in team] == [[0, 1], [2, 3, 4]]
    assert [(r.threads, r.pinned) for r in team] == [(2, True), (3, True)]


def test_ranks_that_were_given_cores_of_their_own_keep_them():
    team = ranks([0, 1], [2, 3])
    launch._assign_cores(team)
    assert [(r.cpus, r.threads, r.pinned) for r in team] == [([0, 1], 2, True), ([2, 3], 2, True)]


def test_more_ranks_than_cores_run_unpinned_on_one_thread_each():
    team = ranks([0, 1], [0, 1], [0, 1])
    launch._assign_cores(team)
    assert [(r.cpus, r.threads, r.pinned) for r in team] == [([0, 1], 1, False)] * 3


def test_cores_of_other_hosts_are_other_cores():
    team = [*ranks([0, 1]), Rank(rank=1, host="b", cpus=[0, 1])]
    launch._assign_cores(team)
    assert [r.threads for r in team] == [2, 2]


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


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ({}, [("cuda:0", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu"), ("cpu", "cpu")]),
        ({"device": "cpu"}, [("cpu", "cpu")] * 4),
        ({"r_device": "cuda"}, [("cuda:0", "cpu"), ("cuda:1", "cpu"), ("cpu", "cuda:2"), ("cpu", "cuda:0")]),
        ({"device": "cpu", "r_device": "cuda"}, [("cpu", "cpu"), ("cpu", "cpu"), ("cpu", "cuda:0"), ("cpu", "cuda:1")]),
    ],
)
def test_gpus_go_round_the_ranks_of_a_host_that_use_one(flags, devices):
    roles, options = "SSRR", EngineOptions(model="", **flags)
    ranks = [Rank(rank=i, host="a", cpus=[i], gpus=3, role=role) for i, role in enumerate(roles)]
    teams = [Team(SimpleNamespace(rank=i), ranks) for i in range(4)]
    assert [(device_of(options, team), kv_device_of(options, team)) for team in teams] == devices


def test_gpu_memory_bounds_what_torch_and_the_kv_cache_take_together(monkeypatch):
    """Without a GPU, torch's figures of one: 80 GiB, of which 60 are free and 10 hold weights."""
    limits, gib = [], 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * gib))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    shape = LayerShape(kv_heads=1, k_dim=64, v_dim=64, q_heads=1, scale=1.0)  # 256 bytes a token
    monkeypatch.setattr(attention_cuda, "capacity_for", lambda shapes, kv_dtype, nbytes, device: nbytes // 256)

    def room(own: str, **flags) -> float:
        """GiB of the KV cache."""
        rank = Rank(rank=0, host="a", cpus=[0], gpus=1, role="SR", device=own, kv_device="cuda:0")
        options = EngineOptions(model="", r_device="cuda", **flags)
        measure_room(options, Team(None, [rank]), SimpleNamespace(shapes=[shape], kv_dtype="bfloat16", block_tokens=64))
        return rank.kv_tokens * 256 / gib

    assert room("cuda:0") == pytest.approx(60 * 0.7) and limits == []
    assert room("cuda:0", gpu_memory=24 * gib) == pytest.approx(14 * 0.7)
    assert limits.pop() == pytest.approx((24 - 14 * 0.7) / 80)
    assert room("cpu", gpu_memory=24 * gib) == pytest.approx(14 * 0.7) and limits == []
    assert room("cuda:0", gpu_memory=24 * gib, kv_memory=20 * gib) == 20
    assert limits.pop() == pytest.approx(4 / 80)
    with pytest.raises(UserError, match="no room for a KV cache"):  # the weights alone take more
        room("cuda:0", gpu_memory=8 * gib)


def test_a_rank_that_should_have_a_gpu_and_sees_none_is_named():
    ranks = [Rank(rank=i, host=f"n{i}", cpus=[0], gpus=int(i == 0), role="SR"[i]) for i in range(2)]
    team = Team(SimpleNamespace(rank=0), ranks)
    assert device_of(EngineOptions(model="", device="cuda"), team) == "cuda:0"
    with pytest.raises(UserError, match="--r-device cuda: rank 1 on n1 sees no GPU"):
        kv_device_of(EngineOptions(model="", r_device="cuda"), team)
