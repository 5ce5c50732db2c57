"""Deal the units of a trace out to the members of a group, and say along which dimension each tensor is dealt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.labels import Labelling, fewer
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.operators import Linear, dim_argument, slice_argument
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.units import REPLICATED, Ints
from hpcdecode.model.frontend.whole_experts import feeds_same_experts, owners_of_experts

aten = torch.ops.aten
EVERYONE = -1  # owner of columns that every member has
BLOCKS = (32, 16)  # units that are dealt together if there are enough: packed panels stay whole


class Undealable(Exception):
    """A tensor cannot be dealt out along one dimension with something for every member."""


@dataclass(frozen=True, eq=False)
class Dealt:
    """How a tensor is dealt out along one dimension.

    Attributes:
        dim: The dimension.
        owners: Member that has each index of the dimension, or EVERYONE; [size].
    """

    dim: int
    owners: Ints

    def same(self, other: Dealt | None) -> bool:
        """Return whether `other` is dealt out in the same way."""
        return other is not None and self.dim == other.dim and np.array_equal(self.owners, other.owners)

    def own(self, member: int) -> Ints:
        """Return the indices that a member has, in order."""
        return np.nonzero((self.owners == member) | (self.owners == EVERYONE))[0]

    def ranges(self, member: int) -> tuple[tuple[int, int], ...]:
        """Return the indices that a member has as ranges: first index, last index + 1."""
        own = self.own(member)
        ends = np.nonzero(np.diff(own) != 1)[0]
        firsts, lasts = np.concatenate([own[:1], own[ends + 1]]), np.concatenate([own[ends], own[-1:]])
        return tuple((int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True))

    def counts(self, member: int, sizes: list[int]) -> list[int]:
        """Return how many indices a member has of parts of these sizes."""
        ends = np.searchsorted(self.own(member), np.cumsum(sizes))
        return [int(count) for count in np.diff(ends, prepend=0)]

    def slice(self, member: int, chosen: slice) -> slice:
        """Return the member's own indices among those `chosen`, by their places among its own.

        Raises:
            Undealable: If they are not evenly spaced.
        """
        own = self.own(member)
        places = np.nonzero(np.isin(own, np.arange(len(self.owners))[chosen]))[0]
        steps = np.unique(np.diff(places))
        if len(places) == 0 or len(steps) > 1:
            raise Undealable
        step = int(steps[0]) if len(steps) else 1
        return slice(int(places[0]), int(places[-1]) + 1, step)


class Deal:
    """What each member of a group has of a trace's tensors.

    Units of an attention are its KV heads, those of a recurrence its heads, dealt evenly. Then come those of the logits
    and of projections, in order and in blocks. What cannot be dealt along one dimension, with something for every
    member, is replicated.

    Args:
        trace: The trace.
        members: Number of members.
        ep: Deal out whole experts, instead of columns of every expert.

    Attributes:
        trace: The trace.
        members: Number of members.
        static: Nodes that depend on no input of a step.
        of: How a node's tensor is dealt. Nodes that every member has whole are left out.
        projections: Projections by static weights, by their nodes.
        experts: How experts that are dealt out whole are, along dimension 0 of their weights, by projection.
    """

    def __init__(self, trace: Trace, members: int, *, ep: bool = False):
        self.trace, self.members = trace, members
        owners = owners_of_experts(trace, members) if ep else {}
        self.experts = {node: Dealt(0, own) for node, own in owners.items()}
        self._labelling = Labelling(trace, members, self.experts)
        self.static, self._statistics = self._labelling.static, self._labelling.statistics
        self.projections = {linear.node: linear for linear, _, _ in self._labelling.projections}
        self.of: dict[fx.Node, Dealt] = {}
        units = self._labelling.units
        while wrong := self._attempt(units.table()):
            for labels in wrong:
                units.replicate(labels)
            units.settle()

    def of_weight(self, linear: Linear) -> Dealt | None:
        """Return how a projection's weight is dealt out: along its experts, inputs or outputs, or None for not."""
        if linear.node in self.experts:
            return self.experts[linear.node]
        if linear.x in self.of:
            return Dealt(linear.in_dim, self.of[linear.x].owners)
        y = self.of.get(linear.node)
        return None if y is None else Dealt(linear.out_dim, y.owners)

    def sums_up(self, linear: Linear) -> bool:
        """Return whether the members' results add up to that of the projection."""
        if linear.node in self.experts:
            return not feeds_same_experts(linear.node)
        return linear.x in self.of

    def is_partial(self, node: fx.Node) -> bool:
        """Return whether `node` is a reduction of which every member has a part."""
        return node in self._statistics and node.args[0] in self.of

    def _attempt(self, unit: Ints) -> list[Tensor]:
        """Deal all units out, and return the labels that must be replicated before another attempt.

        Args:
            unit: Unit of every label.
        """
        owner = np.full(len(unit), EVERYONE, dtype=np.int32)
        wrong = [heads for heads in self._labelling.heads.values() if not self._deal_heads(unit[heads], owner)]
        wrong += [labels for labels in self._families() if not self._deal(unit[labels.reshape(-1)], owner)]
        return wrong or self._find(owner[unit]) or [*self._wrong()]

    def _families(self) -> Iterator[Tensor]:
        """Yield labels whose units are dealt out in their order."""
        labelling = self._labelling
        if self.trace.logits in labelling.of:
            yield labelling.of[self.trace.logits]
        yield from (x for _, x, _ in labelling.projections if x is not None)
        yield from (y for _, _, y in labelling.projections if y is not None)

    def _deal_heads(self, units: Ints, owner: Ints) -> bool:
        """Deal the units of KV heads out evenly. Return whether that is possible."""
        if not units.any():
            return True
        even = np.arange(len(units)) * self.members // len(units)
        owner[units] = even
        return bool((units != REPLICATED).all()) and np.array_equal(owner[units], even)

    def _deal(self, units: Ints, owner: Ints) -> bool:
        """Deal those of `units` out that nobody owns. Return whether there are enough for all members."""
        if not units.any():
            return True
        if fewer(units[units != REPLICATED], self.members):
            return False
        free = units[(owner[units] == EVERYONE) & (units != REPLICATED)]
        if (np.diff(free) <= 0).any():
            _, first = np.unique(free, return_index=True)
            free = free[np.sort(first)]
        owner[free] = in_blocks(len(free), self.members)
        return True

    def _find(self, owner: Ints) -> list[Tensor]:
        """Set how every node is dealt, and return the labels of those that cannot be; owner: of every label."""
        self.of, wrong = {}, []
        known: dict[object, Dealt | None] = {}
        for node, labels in self._labelling.of.items():
            key = labels.data_ptr(), labels.shape, labels.stride()
            try:
                if key not in known:
                    known[key] = dealt(owner[labels.numpy()], self.members)
                if (found := known[key]) is not None:
                    self.of[node] = found
            except Undealable:
                wrong.append(labels)
        return wrong

    def _wrong(self) -> Iterator[Tensor]:
        """Yield labels of tensors that are dealt, and must not be."""
        of = self._labelling.of
        for linear in self.projections.values():
            if linear.x in self.of and (self.of[linear.x].owners == EVERYONE).any():
                yield of[linear.x]
        for node, dims in self._statistics.items():
            x = as_node(node.args[0])
            if x in self.of and (self.of[x].dim not in dims or (self.of[x].owners == EVERYONE).any()):
                yield of[x]
        logits = self.of.get(self.trace.logits)
        if logits is not None and ((np.diff(logits.owners) < 0).any() or (logits.owners == EVERYONE).any()):
            yield of[self.trace.logits]
        for node, labels in of.items():
            if node.target is aten.slice.Tensor and not self._sliceable(node):
                yield from (labels, of[as_node(node.args[0])])

    def _sliceable(self, node: fx.Node) -> bool:
        """Return whether a slice is one of each member's own columns."""
        x = as_node(node.args[0])
        if x not in self.of or dim_argument(node, 1, len(tensor_meta(x).shape)) != self.of[x].dim:
            return True
        try:
            for member in range(self.members):
                self.of[x].slice(member, slice_argument(node))
        except Undealable:
            return False
        return True


def in_blocks(count: int, members: int) -> Ints:
    """Return the owner of each of `count` units: whole blocks of them in order, as evenly as possible."""
    sizes = [size for size in BLOCKS if count >= size * members] or [1]
    dealt_out = [by_blocks(count, members, size) for size in sizes]
    return min(dealt_out, key=lambda owners: np.bincount(owners, minlength=members).max())


def by_blocks(count: int, members: int, size: int) -> Ints:
    """Return the owner of each of `count` units, in blocks of `size` units."""
    blocks = -(-count // size)
    owners: Ints = np.repeat(np.arange(blocks) * members // blocks, size)[:count]
    return owners


def dealt(owners: Ints, members: int) -> Dealt | None:
    """Return how a tensor is dealt out whose elements have these owners, or None if every member has all of it.

    Raises:
        Undealable: If it is not dealt along one dimension, or if a member has nothing of it.
    """
    if (owners == EVERYONE).all():
        return None
    varies = [dim for dim in range(owners.ndim) if (owners != owners.take([0], dim)).any()]
    if len(varies) != 1:
        raise Undealable
    line = owners[tuple(slice(None) if dim == varies[0] else 0 for dim in range(owners.ndim))]
    if len(np.unique(line[line != EVERYONE])) < members:
        raise Undealable
    return Dealt(varies[0], line)
