"""Wire memory between an S-rank and one of its R-ranks, and what lies in it.

Ranks of one host share it: the one writes where the other reads, and a message without content says that it is
done. Between hosts, or where a layer has no room in what is shared, each has its own and the message has the content.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.exchange.base import Piece, Share
from hpcdecode.mpi.wait import wait

_ALIGN = 64  # bytes
_SHARED_MEMORY = "/dev/shm"
_SIGNAL = [bytearray(0), MPI.BYTE]
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A piece of one layer: views of the wire, and the messages that announce or carry them.

    To the R-rank in `message`: rows [n, row_columns], prompts [m, kv_columns]; back in `answer`: out [n, out_columns].
    """

    piece: Piece
    rows: Tensor
    prompts: Tensor
    out: Tensor
    message: list
    answer: list


class Wire:
    """Both directions between two ranks. shared: uint8, to the R-rank and back; empty where they share none.

    device: where this rank has what it does not share.
    """

    def __init__(self, dtype: torch.dtype, shared: tuple[Tensor, Tensor], device: torch.device):
        self._there, self._back = (_Way(dtype, way.view(dtype), device) for way in shared)

    def parcels(self, share: Share, shape: LayerShape) -> list[Parcel]:
        """The pieces of a layer of this shape; they lie where those of the layer before did."""
        sizes = [piece.elements(shape) for piece in share.pieces]
        outs = [len(piece.decode_rows) * shape.out_columns for piece in share.pieces]
        there, back = self._there.take(sizes), self._back.take(outs)
        return [_parcel(piece, shape, *ways) for piece, *ways in zip(share.pieces, there, back, strict=True)]


class _Way:
    """Memory of one direction: what is shared, and private memory that grows when a layer needs more than that."""

    def __init__(self, dtype: torch.dtype, shared: Tensor, device: torch.device):
        self._shared, self._own = shared, torch.empty(0, dtype=dtype, device=device)

    def take(self, sizes: list[int]) -> list[tuple[Tensor, list]]:
        """Stretches of so many elements, each with the message that announces or carries it."""
        total = sum(sizes)
        if total <= len(self._shared):
            return [(stretch, _SIGNAL) for stretch in self._shared[:total].split(sizes)]
        if total > len(self._own):
            self._own = torch.empty(total + total // 4, dtype=self._own.dtype, device=self._own.device)
        return [(stretch, _content(stretch)) for stretch in self._own[:total].split(sizes)]


def _content(stretch: Tensor) -> list:
    """The message that carries it. MPI takes a tensor on a device by its address there."""
    if not len(stretch):
        return _SIGNAL
    content = stretch.view(torch.uint8)
    return [content.numpy() if content.device.type == "cpu" else content, MPI.BYTE]


def _parcel(piece: Piece, shape: LayerShape, there: tuple[Tensor, list], back: tuple[Tensor, list]) -> Parcel:
    n = len(piece.decode_rows)
    (memory, message), (out, answer) = there, back
    rows, prompts = memory[: n * shape.row_columns], memory[n * shape.row_columns :]
    shapes = (n, shape.row_columns), (len(piece.prefill_rows), shape.kv_columns), (n, shape.out_columns)
    views = (part.view(size) for part, size in zip((rows, prompts, out), shapes, strict=True))
    return Parcel(piece, *views, message, answer)


def shared_sizes(shapes: Sequence[LayerShape], slots: int, prefill_tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a layer takes on its way to an R-rank, and back, with so many decode and prompt tokens."""
    there = max(slots * s.row_columns + prefill_tokens * s.kv_columns for s in shapes)
    return there * dtype.itemsize, slots * max(s.out_columns for s in shapes) * dtype.itemsize


class Window:
    """The wires of a lane, shared among its ranks of one host. Every rank of the lane makes one, and closes it.

    sizes: bytes to each R-rank and back that are shared, where the host has so much shared memory to give.
    wires: those of this rank; by R-rank on the S-rank. device: as of `Wire`.
    """

    def __init__(self, comm: MPI.Intracomm, dtype: torch.dtype, sizes: tuple[int, int], device: torch.device = HOST):
        self._here = comm.Split_type(MPI.COMM_TYPE_SHARED)
        there, back = (-(-size // _ALIGN) * _ALIGN for size in sizes)
        places = comm.group.Translate_ranks(range(comm.size), self._here.group)
        beside_s = places[0] != MPI.UNDEFINED
        own = there + back if comm.rank > 0 and beside_s and self._enough(there + back) else 0
        self._window = MPI.Win.Allocate_shared(own, 1, comm=self._here)
        if own:  # touched at once: the next lane's look at what is left counts it, and it lies on this rank's node
            np.frombuffer(self._window.tomemory(), np.uint8)[:] = 0
        wait(self._here.Ibarrier())  # nobody writes there before
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.sync = self._window.Sync  # memory barrier: before a signal is sent, and after one has come
        mine = places[1:] if comm.rank == 0 else [places[comm.rank]]
        segments = (self._segment(place if beside_s else MPI.UNDEFINED, there) for place in mine)
        self.wires = [Wire(dtype, segment, device) for segment in segments]

    def _enough(self, size: int) -> bool:
        """Whether this host has room for what its ranks take: a touch of shared memory that is not there kills."""
        status = os.statvfs(_SHARED_MEMORY)
        return 2 * size * self._here.size <= status.f_bavail * status.f_frsize

    def _segment(self, place: int, there: int) -> tuple[Tensor, Tensor]:
        """An R-rank's memory, to it and back; empty where there is none."""
        memory = b"" if place == MPI.UNDEFINED else self._window.Shared_query(place)[0]
        whole = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
        return whole[:there], whole[there:]

    def close(self) -> None:
        del self.wires
        self._window.Unlock_all()
        self._window.Free()
        self._here.Free()
