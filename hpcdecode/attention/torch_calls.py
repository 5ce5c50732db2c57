"""The sequences of a call of a KV cache in torch: what its rows are, and where in blocks they and others lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.base import IntArray
from hpcdecode.attention.block_table import BlockTable
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.torch_reads import RowPlaces, Wave, to_device, waves

T = TypeVar("T")


class DeviceRows(NamedTuple):
    """`RowPlaces` on the device, int32; blocks are one row of the table behind the other."""

    sequences: Tensor
    positions: Tensor
    blocks: Tensor


class CallSequences:
    """The sequences of a call. What kernels need of them is made when it is asked for first, and kept.

    A place is the number of a row of a store whose blocks have `stride` rows each.

    Args:
        table: Which blocks they hold.
        slots: int32 [n].
        counts: int32 [n].
        device: Of the tensors.

    Attributes:
        tokens: Number of rows.
        rows: Where they lie.
        device: Of the tensors.
        block_tokens: Tokens of a block.
    """

    def __init__(self, table: BlockTable, slots: IntArray, counts: IntArray, device: torch.device) -> None:
        own, new = table.written(slots, counts)
        self.device, self.block_tokens = device, table.block_tokens
        firsts = np.repeat(np.cumsum(new) - new, new)
        sequences = np.repeat(np.arange(len(own)), new)
        self.tokens = len(sequences)
        positions = (table.lengths[own] - new)[sequences] + np.arange(self.tokens) - firsts
        self.rows = RowPlaces(sequences, positions, table.held(own), table.block_tokens)
        self._first, self._lengths = table.lengths[own] - new, table.lengths[own]
        self._kept: dict[Hashable, object] = {}

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was asked for with this key first."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("T", self._kept[key])

    @property
    def on_device(self) -> DeviceRows:
        """Return where the rows lie, on the device."""
        r, device = self.rows, self.device
        return self.kept("rows", lambda: DeviceRows(*to_device([r.sequences, r.positions, r.blocks.ravel()], device)))

    def written(self, stride: int) -> Tensor:
        """Return the places of the rows, int64 [tokens]."""
        return self.completed(1, stride)[1]

    def completed(self, unit: int, stride: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return which rows complete units, such as pools, and the places of these.

        Args:
            unit: Tokens of a unit.
            stride: Rows of a block.
            first: Row of a block at which its first unit lies.

        Returns:
            Rows and places, int64 [n] each.
        """
        return self.kept(("completed", unit, stride, first), lambda: self._completed(unit, stride, first))

    def _completed(self, unit: int, stride: int, first: int) -> tuple[Tensor, Tensor]:
        positions, blocks = self.rows.positions, self.rows.blocks
        rows = np.flatnonzero((positions + 1) % unit == 0)
        block = positions[rows] // self.block_tokens
        ids = blocks[self.rows.sequences[rows], block].astype(np.int64)
        places = ids * stride + first + positions[rows] // unit - block * self.block_tokens // unit
        sent = to_device([rows, places], self.device)
        return sent[0].long(), sent[1].long()

    def waves(self, shape: LayerShape, group: int, most: int) -> list[Wave]:
        """Return what the rows read at a layer that attends to all tokens which they see."""
        key = "waves", shape.window, shape.chunked, shape.bias is not None, group, most
        return self.kept(key, lambda: waves(self.rows, shape, group, most, self.device))

    def tokens_read(self, shape: LayerShape) -> int:
        """Return the tokens of which K and V are read at such a layer, those of a sequence once."""
        low = shape.first_seen(self._first)
        some = self._lengths > self._first
        return int((self._lengths - low)[some].sum())
