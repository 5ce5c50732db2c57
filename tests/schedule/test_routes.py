"""Rotation: every slice is on one copy, neighbouring lanes are on neighbouring copies, and all copies do as much."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpcdecode.schedule.routes import Rotation


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize("layers", [1, 2, 7, 30])
def test_copies_share_the_slices_of_a_lane(copies, layers):
    route = Rotation(copies, layers)
    for lane in range(copies + 1):
        visits = [route.visits(lane, copy) for copy in range(copies)]
        assert (
            sorted(number for own in visits for number in own) == list(range(layers + 1))
            and route.copy(lane, layers) == 0
        )
        counts = [sum(number < layers for number in own) for own in visits]
        assert max(counts) - min(counts) <= 1
        assert all(b - a == copies for own in visits for a, b in pairwise(own) if b < layers)


def test_lanes_are_staggered():
    route = Rotation(3, 12)
    for number in range(12):
        assert {route.copy(lane, number) for lane in range(3)} == {0, 1, 2}
        assert route.copy(3, number) == route.copy(0, number)
