"""What the lead says of the members of a group: shares, heads, sums, and what each has whole."""

from __future__ import annotations

import pytest

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.engine.announce import _members
from hpcdecode.engine.member_part import MemberPart
from hpcdecode.engine.setup import Setup

ATTENTION = LayerShape(kv_heads=1, k_dim=16, v_dim=16, q_heads=2, scale=1.0)
STATE = RecurrentShape(heads=4, k_heads=2, k_dim=16, v_dim=16)
CONVOLUTION = RecurrentShape(heads=64, k_heads=64, k_dim=0, v_dim=1, taps=3)


def setup(shapes: list, members: list[MemberPart]) -> Setup:
    return Setup(shapes, members, "float32", "float32", 16, 0, None, 0, frozenset())


def part(layers: tuple[int, int], share: float, sums: int, copied: int) -> MemberPart:
    return MemberPart(layers, [], {}, (0, 512), share, sums, copied)


@pytest.mark.parametrize(
    ("shapes", "copied", "said"),
    [
        ([ATTENTION, STATE], 0, "KV heads 1, heads of states 4; 6 sums a step"),
        ([STATE, STATE], 2, "heads of states 4; 6 sums a step; 2 of 2 layers have all heads on each member"),
        ([CONVOLUTION], 0, "channels of convolutions 64; 6 sums a step"),
    ],
)
def test_heads_of_members_are_told(shapes, copied, said):
    members = [part((0, len(shapes)), share, 6, copied) for share in (0.52, 0.5)]
    expected = f"members: each holds 0.50 .. 0.52 of the projections' weights, {said}"
    assert _members(setup(shapes, members)) == expected


def test_layers_that_stages_copy_add_up():
    members = [part((2, 4), 0.6, 3, 1)] * 2 + [part((0, 2), 0.6, 3, 2)] * 2
    assert _members(setup([STATE] * 4, members)).endswith("; 3 of 4 layers have all heads on each member")
