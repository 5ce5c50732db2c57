"""Layouts with ranks that only prefill: who is what, and what is refused."""

from __future__ import annotations

import pytest

from hpcdecode.config import EngineOptions
from hpcdecode.errors import UserError
from hpcdecode.ranks.layout import assign_roles, groups_of
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.wishes import Wishes


def world(size, **wishes):
    """Return the ranks of a world, and what is said of their layout."""
    ranks = [Rank(rank=i, host="a", cpus=[i]) for i in range(size)]
    return ranks, assign_roles(ranks, Wishes(**wishes))


def test_one_beside_an_s_rank():
    ranks, said = world(3, prefill_ranks=1)
    (group,) = groups_of(ranks)
    assert said == "1 S + 1 prefill + 1 R"
    assert (group.members, group.pools, group.home) == ([0, 1], [[2], [2]], 0)
    assert [rank.only_prefills for rank in ranks] == [False, True, False]
    assert [rank.turns for rank in ranks] == [1, 1, 1] and ranks[2].prefill and ranks[0].copies == 2


def test_two_for_each_of_two_s_ranks_with_own_pools():
    ranks, said = world(8, s_ranks=2, prefill_ranks=4, pools="own")
    assert said == "2 S + 4 prefill + 2 R"
    assert [(g.members, g.pools) for g in groups_of(ranks)] == [([0, 1, 2], [[6]] * 3), ([3, 4, 5], [[7]] * 3)]


@pytest.mark.parametrize(
    ("size", "wishes", "problem"),
    [
        (1, {}, "--prefill-ranks 1: the world has 1 rank"),
        (2, {}, "--s-ranks and --prefill-ranks, together 2: the world has 2 ranks, which leaves no R-rank"),
        (3, {"layout": "replicas"}, "got --layout replicas"),
        (3, {"tp": 2}, "expected the layout split, --route fixed, --tp 1 and --pp 1"),
        (3, {"pp": 2}, "--tp 1 and --pp 2; leave the others out"),
        (3, {"route": "rotational"}, "--route rotational, --tp 1 and --pp 1; leave the others out"),
        (4, {"s_ranks": 2}, "expected a multiple of the 2 S-ranks, which have as many each, got 1"),
    ],
)
def test_layouts_that_cannot_be_are_refused(size, wishes, problem):
    with pytest.raises(UserError) as refused:
        world(size, prefill_ranks=1, **wishes)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"exchange": "collective"}, "--prefill-ranks: expected no --survive and no --exchange collective"),
        ({"survive": True}, "--prefill-ranks: expected no --survive and"),
        ({"prefill_ranks": -1}, "--prefill-ranks: expected an integer >= 1, got -1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, problem):
    with pytest.raises(UserError) as refused:
        EngineOptions(model="m", **{"prefill_ranks": 1, **options}).check()
    assert problem in str(refused.value)
    assert EngineOptions(model="m", prefill_ranks=0, exchange="collective").check()
