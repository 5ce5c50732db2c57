"""A slice with its weights: its stretches, which hand what members of a group must add up to whoever runs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from hpcdecode.model.frontend.plausible import pieces_of
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.frontend.stretches import Stretch, stretches_of
from hpcdecode.model.frontend.whole_experts import owner_of
from hpcdecode.model.lower.compile import Compiled, compile_graph
from hpcdecode.model.lower.few_bits import ALL_FORMS, Quantised
from hpcdecode.model.lower.recipe import MadeBefore, ReadWeight, Recipe
from hpcdecode.system.shared_memory import WeightMemory

T = TypeVar("T")


class MemberShare(NamedTuple):
    """What a member gives to a sum over the members of its group.

    Attributes:
        x: The share, of any shape that all members have.
        expert: Experts that the router chose for each token, int64 [T, k], if the share is of whole ones; else None.
        experts: Number of experts of the layer.
        own_rows: Whether `x` is [T, columns], with zeros for tokens that no expert of this member was chosen for.
    """

    x: Tensor
    expert: Tensor | None = None
    experts: int = 0
    own_rows: bool = False

    def owners(self, members: int) -> NDArray[np.int64] | None:
        """Return the member that has each chosen expert, [T, k], or None if the share is of no whole experts."""
        return None if self.expert is None else owner_of(self.expert.cpu().numpy(), self.experts, members)


Summed = Generator[MemberShare, Tensor, T]  # yields this member's share of a sum, is sent the sum, returns a result


class CompiledStretch(NamedTuple):
    """A stretch, and what runs it."""

    stretch: Stretch
    compiled: Compiled


class CompiledSlice:
    """What runs the slices of one graph.

    Args:
        graph: ([o,] context..., weights...) -> (rows..., context...) or (logits,).
        device: Device of the slices.
        weights: What the weights of projections are packed as.
        inductor: Let torch's compiler compile the slices.
        rows: Number of the first results that are to lie side by side.
    """

    def __init__(self, graph: fx.Graph, device: torch.device, weights: Quantised, inductor: bool, rows: int):
        self._device = device
        cut = stretches_of(graph)
        ends = (s is cut[-1] for s in cut)
        made = (
            compile_graph(s.graph, device, weights.of(s.weights), inductor, ends=last, rows=rows if last else 0)
            for s, last in zip(cut, ends, strict=True)
        )
        self._stretches = list(map(CompiledStretch, cut, made))

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to int8 for GEMMs by weights in few bits."""
        made = (recipe.bits for stretch in self._stretches for recipe in stretch.compiled.recipes)
        return any(bits is not None and ALL_FORMS[bits].rounded for bits in made)

    def bound(self, read: ReadWeight, memory: WeightMemory, made: MadeBefore = lambda recipe: None) -> BoundSlice:
        """Return a slice with its weights.

        Args:
            read: Returns a weight that the slice's graph names, by number.
            memory: Where to put packed weights of CPUs.
            made: Returns the weight of a recipe, whose sources the slice's graph names, if it was made before.
        """

        def weights(stretch: Stretch, compiled: Compiled) -> tuple[Tensor | Stack, ...]:
            return compiled.weights(
                lambda number, blocks=None: read(stretch.weights[number], blocks),
                memory,
                self._device,
                lambda recipe: made(of_slice(recipe, stretch)),
            )

        return BoundSlice([BoundStretch(s, c, weights(s, c)) for s, c in self._stretches])


@dataclass(frozen=True)
class BoundStretch:
    """A stretch, what runs it, and its weights as that takes them."""

    stretch: Stretch
    compiled: Compiled
    weights: tuple[Tensor | Stack, ...]

    def run(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the stretch makes of the values of its slice."""
        return self.compiled.run(*(values[i] for i in self.stretch.takes), *self.weights)

    def share(self, values: Sequence[Tensor]) -> tuple[MemberShare, Sequence[Tensor]]:
        """Return the share of the sum with which the stretch ends, and the other values that it makes."""
        x, *others = self.run(values)
        if not self.stretch.experts:
            return MemberShare(x), others
        return MemberShare(x, others[0], self.stretch.experts, self.stretch.own_rows), others[1:]


@dataclass(frozen=True)
class BoundSlice:
    """The stretches of a slice with their weights."""

    stretches: Sequence[BoundStretch]

    @property
    def last(self) -> BoundStretch:
        """The stretch with which the slice ends."""
        return self.stretches[-1]

    def made(self) -> Iterator[tuple[Recipe, Tensor | Stack]]:
        """Yield every weight with its recipe, whose sources the slice's graph names."""
        for stretch, compiled, weights in ((s.stretch, s.compiled, s.weights) for s in self.stretches):
            yield from ((of_slice(r, stretch), w) for r, w in zip(compiled.recipes, weights, strict=True))

    def plain_pieces(self) -> Iterator[Tensor]:
        """Yield the weights, or pieces of stacked ones, that are used as they were read, on the host."""
        for stretch in self.stretches:
            for recipe, weight in zip(stretch.compiled.recipes, stretch.weights, strict=True):
                if recipe.form == "plain":
                    yield from (piece for piece in pieces_of(weight) if piece.device.type == "cpu")

    def up_to_last(self, inputs: Sequence[Tensor]) -> Summed[list[Tensor]]:
        """Run all stretches but the last; return the values that there are then."""
        values = list(inputs)
        for stretch in self.stretches[:-1]:
            share, others = stretch.share(values)
            values += [(yield share), *others]
        return values


def of_slice(recipe: Recipe, stretch: Stretch) -> Recipe:
    """Return a recipe of a stretch with the numbers that the slice's graph has for its sources and biases."""
    sources, biases = (tuple(stretch.weights[i] for i in numbers) for numbers in (recipe.sources, recipe.biases))
    return replace(recipe, sources=sources, biases=biases)


def alone(work: Summed[T]) -> T:
    """Return the result of work that has nothing to add up.

    Raises:
        TypeError: If it has: its model is a member's.
    """
    try:
        next(work)
    except StopIteration as end:
        result: T = end.value
        return result
    raise TypeError("a member of a group cannot run a slice alone: it lacks the others' shares of its sums")


def together(works: Sequence[Summed[T]], add: Callable[[Sequence[Tensor]], Tensor]) -> list[T]:
    """Return the results of the members of a group that lie in one process, with `add` for their sums."""
    results: list[T] = []
    totals: list[Tensor | None] = [None] * len(works)
    while not results:
        shares: list[Tensor] = []
        for work, total in zip(works, totals, strict=True):
            try:
                shares.append((next(work) if total is None else work.send(total)).x)
            except StopIteration as end:
                results.append(end.value)
        totals = [add(shares)] * len(works) if shares else totals
    return results
