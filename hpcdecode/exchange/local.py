"""Both roles in one process: the S-rank's rows go straight to the attention, no message passing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode.attention.base import LayerRows
from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.exchange.base import Attention, OnlyEnd, PackedRows, Parcel, joined
from hpcdecode.exchange.device import Memory, PlainMemory
from hpcdecode.exchange.shares import Piece, Share, prompt_columns
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan


class PieceRows(NamedTuple):
    """The rows of a piece: of decodes [n, row_columns] and of prompts [m, kv_columns], and the output [n, out_columns].

    Attributes:
        piece: whose rows they are.
        decodes: as `Attention.attend` takes them.
        prompts: as `Attention.attend` takes them.
        out: of the decode rows.
    """

    piece: Piece
    decodes: Tensor
    prompts: Tensor
    out: Tensor


class LocalParcel(NamedTuple):
    """The memory of a layer's rows, packed by a device for this process."""

    packed: Sequence[PackedRows]


class LocalLink(OnlyEnd):
    """A lane whose only R-rank is this process.

    Args:
        attention: of this process.
        lane: index of the lane.
        first_slot: of the KV cache, the first that is the lane's.
        memory: where a device packs rows, if it does.

    Attributes:
        share: what the plan of the lane's step asks of the R-rank.
    """

    def __init__(self, attention: Attention, lane: int, first_slot: int, memory: Memory | None = None):
        self.attention, self.lane, self.first_slot = attention, lane, first_slot
        self._own, self._packed = memory or PlainMemory(), (torch.empty(0), torch.empty(0))
        self._parcels: dict[MixerShape, list[LocalParcel]] = {}
        self._layer = 0
        self.share: Share | None = None
        self._under_way: list[tuple[Waitable, Tensor, Tensor]] = []  # on a device that attends later, and what it reads

    def send_plan(self, plan: Plan) -> None:
        """Let the attention apply the plan."""
        self.share, self._parcels = Share(plan, 0, self.first_slot), {}
        self.attention.apply(self.lane, self.share)

    def answers_prompts(self, layer: int) -> bool:
        """Return whether the layer keeps a state."""
        return not isinstance(self.attention.kv_cache.layers[layer], LayerShape)

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Attend now, or tell a device to."""
        for piece in self._pieces(layer, rows, o):
            mark = self.attention.attend(self.lane, layer, *piece)
            if mark:
                self._under_way.append((mark, piece.decodes, piece.prompts))

    def rows_beside(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> LayerRows | None:
        """Return what `send_rows` would do, for prompt attention to do beside its own work; None if it is nothing."""
        pieces = list(self._pieces(layer, rows, o))
        return self.attention.rows_beside(layer, *pieces[0]) if pieces else None

    def _pieces(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> Iterator[PieceRows]:
        """Yield the rows of each piece of the share, of which there is one at most."""
        assert self.share is not None, "send_rows: expected a plan first"
        for piece in self.share.pieces_of(self.attention.kv_cache.layers[layer]):
            n = len(piece.decode_rows)
            decodes = joined(*(x[:n] for x in rows))
            prompts = joined(*(x[n:] for x in rows[1:])) if n < len(rows[0]) else decodes[:0]
            yield PieceRows(piece, decodes, prompts, o[:n])

    @property
    def shapes(self) -> Sequence[MixerShape]:
        """Return the shapes of the layers."""
        return self.attention.kv_cache.layers

    def parcels(self, layer: int, dtype: torch.dtype) -> Sequence[LocalParcel]:
        """Return what a device packs for a layer, one parcel at most."""
        assert self.share is not None, "parcels: expected a plan first"
        shape = self.shapes[layer]
        if shape not in self._parcels:
            pieces = self.share.pieces_of(shape)
            self._parcels[shape] = [LocalParcel([self._memory_of(piece, shape, dtype)]) for piece in pieces]
        return self._parcels[shape]

    def _memory_of(self, piece: Piece, shape: MixerShape, dtype: torch.dtype) -> PackedRows:
        sizes = piece.elements(shape), len(piece.decode_rows) * shape.out_columns
        if any(size > len(memory) for size, memory in zip(sizes, self._packed, strict=True)):
            sent, answered = (self._own.empty(size + size // 4, dtype) for size in sizes)
            self._packed = sent, answered
        sent, answered = self._packed
        return PackedRows(piece, None, sent[: sizes[0]], answered[: sizes[1]])

    def begin(self, layer: int) -> None:
        """Take up a layer whose rows a device packs."""
        self._layer = layer

    def expect(self, parcel: Parcel) -> None:
        """Do nothing: the attention writes its output in place."""

    def send(self, parcel: Parcel) -> None:
        """Attend to a parcel, which is packed."""
        shape = self.shapes[self._layer]
        for piece, _, sent, answered in parcel.packed:
            n, m = len(piece.decode_rows), len(piece.prefill_rows)
            rows, prompts = sent[: n * shape.row_columns], sent[n * shape.row_columns :]
            work = rows.view(n, shape.row_columns), prompts.view(m, prompt_columns(shape))
            mark = self.attention.attend(self.lane, self._layer, piece, *work, answered.view(n, shape.out_columns))
            if mark:
                self._under_way.append((mark, *work))

    def exchange(self, parcel: Parcel) -> None:
        """Attend to a parcel, which is packed."""
        self.send(parcel)

    def take_answers(self) -> None:
        """Do nothing: the attention wrote its output in place."""

    def poke(self) -> None:
        """Do nothing: no messages are under way."""

    def Test(self) -> bool:
        """Return whether nothing is under way on a device."""
        self._under_way = [work for work in self._under_way if not work[0].Test()]
        return not self._under_way

    def recv_output(self) -> None:
        """Do nothing: the attention wrote o in place."""

    def take_swapped(self) -> list[tuple[int, bool]]:
        """Return what came of tickets."""
        return self.attention.take_swapped(self.lane)

    def close(self) -> None:
        """Do nothing: there is no connection."""
