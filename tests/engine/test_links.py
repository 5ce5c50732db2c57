"""Both ends of a lane choose the same way across, whatever groups each of them is in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcdecode.config import EngineOptions
from hpcdecode.engine.links import goes_by_collectives
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team


@pytest.mark.parametrize(
    ("exchange", "hosts", "expected"),
    [
        ("auto", "aaaa", False),
        ("auto", "aabb", True),
        ("auto", "abac", True),  # an R-rank beside one S-rank, and away from the other
        ("messages", "aabb", False),
        ("collective", "aaaa", True),
    ],
)
def test_all_ranks_agree_on_the_way(exchange, hosts, expected):
    options = EngineOptions(model="m", exchange=exchange)
    ranks = [Rank(rank=i, host=host, cpus=[0], role="SSRR"[i]) for i, host in enumerate(hosts)]
    teams = [Team(SimpleNamespace(rank=place), ranks) for place in range(4)]
    assert [goes_by_collectives(options, team) for team in teams] == [expected] * 4
