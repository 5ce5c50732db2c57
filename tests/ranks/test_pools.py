"""R-ranks that members of a group do not divide: what to start instead, and why no pool may be larger."""

from __future__ import annotations

import pytest

from hpcdecode.errors import UserError
from hpcdecode.ranks.layout import assign_roles, groups_of
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.wishes import Wishes


def world(size: int) -> list[Rank]:
    return [Rank(rank=i, host="node", cpus=[i]) for i in range(size)]


@pytest.mark.parametrize(
    ("size", "wishes", "got", "instead"),
    [
        (5, Wishes(layout="split", tp=2), "got 2 S-ranks and 3 R-ranks", "start 4 or 6 ranks"),
        (3, Wishes(layout="split", tp=2), "got 2 S-ranks and 1 R-ranks", "start 4 ranks"),
        (9, Wishes(s_ranks=4, tp=2, pp=2), "got 4 S-ranks and 5 R-ranks", "start 8 or 12 ranks"),
        (6, Wishes(s_ranks=3, tp=2), "got 3 S-ranks and 3 R-ranks", "change --s-ranks, the flags or the number"),
    ],
)
def test_pools_of_unequal_numbers_are_refused_with_numbers_that_go(size, wishes, got, instead):
    with pytest.raises(UserError, match=got) as refused:
        assign_roles(world(size), wishes)
    assert instead in str(refused.value)


@pytest.mark.parametrize(("size", "wishes"), [(4, Wishes(layout="split", tp=2)), (12, Wishes(s_ranks=4, tp=2, pp=2))])
def test_the_numbers_go(size, wishes):
    ranks = world(size)
    assign_roles(ranks, wishes)
    (group,) = groups_of(ranks)
    assert len({len(pool) for pool in group.pools}) == 1 and sum(map(len, group.pools)) == size - len(group.members)
