"""What a member of a group has of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class WeightCut(NamedTuple):
    """Ranges of indices along one dimension of a weight.

    Attributes:
        dim: The dimension.
        size: Size of the whole weight in that dimension.
        ranges: First and last index + 1 of each range, in order and without overlap.
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def kept(self) -> int:
        """Return the size of the part in the dimension."""
        return sum(last - first for first, last in self.ranges)

    def of(self, weight: Tensor) -> Tensor:
        """Return the part of `weight`: a view if it is one range, else a copy of the part alone."""
        parts = [weight.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def within(self, first: int, size: int) -> WeightCut:
        """Return what the cut takes of a piece: the indices from `first` on, `size` of them."""
        own = [(max(a - first, 0), min(b - first, size)) for a, b in self.ranges]
        return WeightCut(self.dim, size, tuple((a, b) for a, b in own if a < b))

    def whole_shape(self, part: Sequence[int | str]) -> tuple[int | str, ...]:
        """Return the shape of the whole weight, given that of its part."""
        return (*part[: self.dim], self.size, *part[self.dim + 1 :])


class WeightPart(NamedTuple):
    """A weight of which a node takes a part.

    Attributes:
        name: Name of the weight in the transformers model.
        cut: Indices that the part has.
    """

    name: str
    cut: WeightCut


WeightKey = str | WeightPart  # a whole weight by its name, or a part


@dataclass(frozen=True)
class Membership:
    """What the trace of a member of a group has of the whole model.

    Attributes:
        members: Number of members.
        member: Number of the member, from 0.
        share: Part of the projections' weights that the member holds, 0 to 1.
        vocabulary: Logits that the member computes. Those of all members, in their order, are the model's.
        heads: Heads that the member has, by layer: KV heads of an attention, value heads of a state. Members have
            equally many of a layer, or all.
        copied: Whether members have all heads of a layer, by layer.
        sums: Number of sums over members in a step.
        sums_of_own_rows: Those of them to which a member gives rows of tokens of its own experts alone.
    """

    members: int
    member: int
    share: float
    vocabulary: range
    heads: tuple[range, ...]
    copied: tuple[bool, ...]
    sums: int
    sums_of_own_rows: int = 0
