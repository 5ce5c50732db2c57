"""Sets of columns that belong on one member of a group.

Each column of a tensor has a label, an integer. Labels that must be on one member are joined: they make up a unit. All
joins since the last time are solved at once, by numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.signedinteger[Any]]
REPLICATED = 0  # label and unit of what every member has


class Units:
    """Labels, and the units that they make up: disjoint sets.

    A tensor of labels is int32 and has the shape of the tensor whose columns it labels.
    """

    def __init__(self) -> None:
        self._parent: Ints = np.zeros(1 << 12, dtype=np.int32)
        self._count = 1
        self._joins: list[tuple[Ints, Ints]] = []
        self._copies: list[tuple[Ints, Ints]] = []

    def fresh(self, shape: Sequence[int]) -> Tensor:
        """Return new labels, each a unit of its own."""
        first, self._count = self._count, self._count + math.prod(shape)
        if self._count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros(self._count, dtype=np.int32)])
        self._parent[first : self._count] = np.arange(first, self._count)
        return torch.arange(first, self._count, dtype=torch.int32).view(tuple(shape))

    def join(self, a: Tensor, b: Tensor) -> None:
        """Let each label of `a` be in the unit of the label of `b` at its place. Shapes broadcast."""
        if a is not b and not torch.equal(a, b):
            self._joins.append(pairs(a, b))

    def unite(self, labels: Tensor) -> None:
        """Let the labels of each row [..., n] be one unit."""
        self.join(labels, labels[..., :1].expand(labels.shape))

    def replicate(self, labels: Tensor) -> None:
        """Give every member what has these labels."""
        flat = flattened(labels)
        self._joins.append((flat, np.zeros_like(flat)))

    def copy(self, source: Tensor, copies: Tensor) -> None:
        """Note that columns are broadcast: a source must be on the member of its copies, or on all if those differ."""
        self._copies.append(pairs(source, copies))

    def settle(self) -> None:
        """Work off what has been noted."""
        while self._joins or self._copies:
            if self._joins:
                a, b = (self.find(np.concatenate(side)) for side in zip(*self._joins, strict=True))
                self._joins = []
                self._unite_roots(a, b)
            if self._copies:
                source, copies = (self.find(np.concatenate(side)) for side in zip(*self._copies, strict=True))
                self._copies = []
                self._place_sources(source, copies)

    def find(self, labels: Ints) -> Ints:
        """Return the unit of each label, by the least of its labels."""
        root = self._parent[labels]
        while True:
            above = self._parent[root]
            if np.array_equal(above, root):
                return root
            root = above

    def of(self, labels: Tensor) -> Ints:
        """Return the units of the columns, flat."""
        return self.find(flattened(labels))

    def whole(self, labels: Tensor) -> bool:
        """Return whether every member is known to have all of these columns."""
        first = flattened(labels[(slice(0, 1),) * labels.ndim])
        return not self.find(first).any() and not self.of(labels).any()

    def table(self) -> Ints:
        """Return the unit of every label."""
        return self.find(np.arange(self._count, dtype=np.int32))

    def _unite_roots(self, a: Ints, b: Ints) -> None:
        differ = a != b
        a, b = a[differ], b[differ]
        roots, places = np.unique(np.concatenate([a, b]), return_inverse=True)
        self._parent[roots] = roots[components(len(roots), places[: len(a)], places[len(a) :])]

    def _place_sources(self, source: Ints, copies: Ints) -> None:
        """Join sources whose copies are in one other unit with it; replicate those with copies in more."""
        open_ = (source != copies) & (source != REPLICATED)
        seen = np.unique(np.stack([source[open_], copies[open_]]), axis=1)
        at_home = np.isin(seen[0], source[source == copies])
        _, first, counts = np.unique(seen[0], return_index=True, return_counts=True)
        alone = (counts == 1) & ~at_home[first]
        self._joins.append((seen[0][first], np.where(alone, seen[1][first], REPLICATED)))


def flattened(labels: Tensor) -> Ints:
    """Return labels as a flat array."""
    flat: Ints = labels.reshape(-1).numpy()
    return flat


def pairs(a: Tensor, b: Tensor) -> tuple[Ints, Ints]:
    """Return the labels at each place of `a` and `b`, whose shapes broadcast."""
    a, b = torch.broadcast_tensors(a, b)
    return flattened(a), flattened(b)


def components(count: int, a: Ints, b: Ints) -> Ints:
    """Return for each of `count` nodes the least node that edges (a, b) connect it with."""
    least = np.arange(count)
    while True:
        low_a, low_b = least[a], least[b]
        if np.array_equal(low_a, low_b):
            return least
        low = np.minimum(low_a, low_b)
        np.minimum.at(least, low_a, low)
        np.minimum.at(least, low_b, low)
        while not np.array_equal(above := least[least], least):
            least = above
