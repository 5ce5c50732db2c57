"""Configurations of groups that `bench planner` predicts: which there are, and that a group has a member's costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpcdecode.bench.planner import _GROUPS, _groups
from hpcdecode.bench.predicted import PredictedCase, predict
from tests.support.profiles import profile, with_sums

ROWS = PredictedCase(32, (32, 64), (16, 24), 16, 4)


def test_there_are_eight_for_two_models():
    made = [case for ranks in _GROUPS for case in _groups(ROWS, ranks)]
    assert len(made) * 2 == 8 and len(set(map(str, made))) == 4
    assert [(case.layout, case.tp, case.batch, case.lanes) for case in made] == [
        ("replicas", 2, 16, 1),
        ("replicas", 2, 8, 1),
        ("replicas", 4, 16, 1),
        ("split", 2, 16, 2),
    ]


@pytest.mark.parametrize("layout", ["replicas", "split"])
def test_sums_slow_a_group_down(layout):
    case = replace(ROWS, layout=layout, tp=2, lanes=2)
    quick, slow = (with_sums(profile(4), latency, 2) for latency in (0.0, 1e-2))
    assert predict(quick, case)[0] > 1.2 * predict(slow, case)[0] > 0
