"""Roles and cores of ranks, without starting any; which worlds are refused."""

from __future__ import annotations

import pytest

from hpcdecode import launch
from hpcdecode.errors import UserError
from hpcdecode.launch import Rank


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
