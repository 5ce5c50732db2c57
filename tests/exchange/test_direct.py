"""Whether a rank sends memory of its GPU is decided by the rank, whatever the others compute on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcdecode.config import EngineOptions
from hpcdecode.engine.links import goes_by_collectives
from hpcdecode.engine.setup import direct
from hpcdecode.ranks.roles import Rank

GPU = {"device": "cuda:0", "gpu_mpi": True}
R_GPU = {"kv_device": "cuda:0", "gpu_mpi": True}


def team_of(*ranks):
    made = [
        Rank(rank=number, host=f"host{number}", cpus=[number], role=role, **about)
        for number, (role, about) in enumerate(ranks)
    ]
    return SimpleNamespace(ranks=made, me=made[0])


def told(options, *ranks):
    team = team_of(*ranks)
    return [direct(options, team, rank) for rank in team.ranks]


OPTIONS = EngineOptions(model="m")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("S", GPU), ("R", {}), ("R", {})], [True, False, False]),
        ([("S", GPU), ("R", R_GPU), ("R", {})], [True, True, False]),
        ([("S", {}), ("R", R_GPU)], [False, True]),
        ([("S", {"device": "cuda:0"}), ("R", R_GPU)], [False, True]),
        ([("SR", {**GPU, **R_GPU}), ("SR", GPU)], [False, False]),
    ],
)
def test_each_rank_by_itself(ranks, expected):
    assert told(OPTIONS, *ranks) == expected
    assert direct(OPTIONS, team_of(*ranks)) == expected[0]


def test_not_if_it_is_not_wanted_or_goes_by_collectives():
    ranks = [("S", GPU), ("R", R_GPU)]
    assert told(EngineOptions(model="m", gpu_mpi=False), *ranks) == [False, False]
    assert told(EngineOptions(model="m", exchange="collective"), *ranks) == [False, False]


def test_all_ranks_say_alike_whether_lanes_go_by_collectives():
    ranks = [("S", {}), ("R", {}), ("R", R_GPU)]
    for me in range(3):
        team = team_of(*ranks)
        team.me = team.ranks[me]
        assert not goes_by_collectives(OPTIONS, team)
        assert goes_by_collectives(EngineOptions(model="m", exchange="collective"), team)
    assert goes_by_collectives(OPTIONS, team_of(("S", {"device": "cuda:0"}), ("R", {})))
