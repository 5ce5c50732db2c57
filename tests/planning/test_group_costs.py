"""What groups of several S-ranks cost: as measured where they were, else forecast by their size."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpcdecode.planning.cost import Cost
from hpcdecode.planning.fit import predicted
from hpcdecode.planning.seen_tokens import ChosenTokens
from hpcdecode.planning.steady_load import SteadyLoad
from tests.support.profiles import profile, with_sums

LATENCY = 1e-4
LOAD = SteadyLoad(64, 1, 64, 4)


def measured(slower: float, split: float | None = None):
    """Return a profile of four ranks whose groups of two were measured: steps take `slower` times the forecast."""
    found = with_sums(profile(4), LATENCY, 2)
    forecast = found.of_member(found.replica, 2)
    own = [slower * (s + 2 * 5 * LATENCY) for s in forecast.slice_seconds]
    replica = replace(forecast, slice_seconds=own, sum_latency_seconds=0.0, sum_seconds_per_token=0.0)
    return replace(found, sums=[replace(found.sums[0], replica=replica, split=split)])


def seconds(cost: Cost, ranks: int = 1) -> float:
    return predicted(cost, LOAD, ranks)


def test_groups_of_both_roles_take_what_was_measured():
    """Sums are within the slices that were measured, and are not counted twice."""
    for slower in (0.5, 1.0, 1.8):
        found = measured(slower)
        part = found.of_member(found.replica, 2)
        assert seconds(part) == pytest.approx(seconds(found.sums[0].replica), rel=1e-6)
        assert part.sum_latency_seconds > 0 and min(part.slice_seconds) > 0
    one, other = (measured(slower) for slower in (1.0, 1.8))
    assert seconds(other.of_member(other.replica, 2)) > 1.4 * seconds(one.of_member(one.replica, 2))


def test_sums_that_were_slower_alone_take_half_of_a_slice_at_most():
    found = measured(1.0)
    found = replace(found, sums=[replace(found.sums[0], latency_seconds=1.0)])
    part = found.of_member(found.replica, 2)
    assert seconds(part) == pytest.approx(seconds(found.sums[0].replica), rel=1e-6)
    assert min(part.slice_seconds) >= min(found.sums[0].replica.slice_seconds) / 2


def test_a_split_takes_as_many_times_its_forecast_as_was_measured():
    plain, slower = (measured(1.0, split) for split in (None, 1.3))
    forecast, part = (found.of_member(found.cost, 2) for found in (plain, slower))
    assert seconds(part, 2) == pytest.approx(1.3 * seconds(forecast, 2))
    assert seconds(slower.of_member(slower.replica, 2)) == seconds(plain.of_member(plain.replica, 2))


def test_costs_with_indexers_grow_as_a_whole():
    cost = replace(profile(1).cost, chosen=ChosenTokens(64, 1e-6, 2e-6, 3e-6, 4e-6))
    twice = cost.times(2)
    assert twice.chosen == ChosenTokens(64, 2e-6, 4e-6, 6e-6, 8e-6) and twice.layers == cost.layers
    assert twice.attention_seconds(1000, 4) == pytest.approx(2 * cost.attention_seconds(1000, 4))
