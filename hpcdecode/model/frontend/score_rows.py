"""What models hand to attention, while they are traced, in place of biases of all scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ScoreRows(NamedTuple):
    """Stands for a tensor of biases; `hpcdecode::attend` takes them as `PositionBias`.

    Attributes:
        profiles: Over distances, [dim, extent], or [dim, 0], which all are minus the distance.
        mixes: Of each token, [T, q_heads * dim].
    """

    profiles: Tensor
    mixes: Tensor
