"""Weights of experts that are not one tensor in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

import torch
from torch import Tensor

Pieces = tuple[Tensor, ...]


class Stack(Sequence[Pieces]):
    """A weight of experts in pieces: for each expert the [out_j, in] tensors that make it up.

    Args:
        pieces: Those of each expert.

    Attributes:
        shape: Shape of the weight as one tensor, [E, out, in].
        joined: Whether each expert has one piece, which may be [in, out], and others may take the weight as one tensor.
    """

    def __init__(self, pieces: Iterable[Sequence[Tensor]]):
        held = [tuple(own) for own in pieces]
        first = held[0]
        self.shape: tuple[int, int, int] = (len(held), sum(piece.shape[0] for piece in first), first[0].shape[1])
        self.joined = False
        self._read: Callable[[int], Pieces] = held.__getitem__

    @classmethod
    def read_later(cls, shape: tuple[int, int, int], read: Callable[[int], Pieces], *, joined: bool = False) -> Stack:
        """Return a weight whose pieces are read, or computed, whenever they are asked for.

        Args:
            shape: Its shape.
            read: Returns the pieces of an expert, by its number.
            joined: See `Stack`.
        """
        made = cls.__new__(cls)
        made.shape, made.joined, made._read = shape, joined, read
        return made

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, e: int) -> Pieces: ...
    @overload
    def __getitem__(self, e: slice) -> Sequence[Pieces]: ...
    def __getitem__(self, e: int | slice) -> Pieces | Sequence[Pieces]:
        own = range(len(self))[e]
        return self._read(own) if isinstance(own, int) else [self._read(i) for i in own]

    def held(self) -> Tensor | Stack:
        """Return the weight in memory: one tensor if it is joined, else its pieces."""
        return self.whole() if self.joined else Stack(self)

    def whole(self) -> Tensor:
        """Return the weight as one tensor, filled an expert at a time, so that nothing else is as large."""
        pieces = self[0]
        made = pieces[0].new_empty(self.shape)
        for e, out in enumerate(made):
            pieces = pieces if e == 0 else self[e]
            torch.cat(pieces, out=out)
        return made
