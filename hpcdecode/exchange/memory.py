"""The memory of a lane between an S-rank and its R-ranks, and the messages about it.

Ranks of one host share it: one writes where the other reads, and a message without content says that it is done.
Between hosts, or if a layer has no room in what is shared, each rank has its own and the message has the content.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.exchange.base import PackedRows, Piece, prompt_columns
from hpcdecode.exchange.device import Memory, PlainMemory
from hpcdecode.exchange.partition import Partition, RankColumns
from hpcdecode.mpi.mpich import SHARED_MEMORY
from hpcdecode.mpi.wait import wait

Buffer = list[Any]  # [memory, MPI datatype], as mpi4py takes it

_ALIGN = 64  # bytes
_SIGNAL: Buffer = [bytearray(0), MPI.BYTE]
HOST = torch.device("cpu")


@dataclass(frozen=True)
class LaneSpec:
    """What both ends of a lane agree on.

    Attributes:
        shapes: of whole layers, before a partition by head.
        slots: sequences and prefixes that the lane may hold at once.
        dtype: of q, k, v and o.
        partition: how the attention is spread over the lane's R-ranks.
        shared_bytes: shared memory to each R-rank and back, if the host has it; (0, 0) shares none.
        pieces: of the work of an R-rank in a layer, at most.
        device: where this rank has memory that it does not share; R-ranks that have it on a device share none.
        memory: how this rank gets it, and lets a device see what is shared.
    """

    shapes: Sequence[MixerShape]
    slots: int
    dtype: torch.dtype
    partition: Partition
    shared_bytes: tuple[int, int] = (0, 0)
    pieces: int = 1
    device: torch.device = HOST
    memory: Memory = field(default_factory=PlainMemory)


@dataclass(frozen=True, slots=True)
class Message:
    """A piece of one layer: its tensors in the memory of a lane, and what MPI sends to announce or carry them.

    Attributes:
        rows: decode rows [n, row_columns], to the R-rank.
        prompts: prefill rows [m, kv_columns], to the R-rank.
        out: output [n, out_columns], back.
        qkv: what is sent to the R-rank.
        answer: what is sent back.
    """

    piece: Piece
    rows: Tensor
    prompts: Tensor
    out: Tensor
    qkv: Buffer
    answer: Buffer

    def packed(self, columns: RankColumns | None) -> PackedRows:
        """Return its memory, to be filled by a device; columns: that the R-rank has, None for all."""
        size = self.rows.numel() + self.prompts.numel()
        return PackedRows(self.piece, columns, self.rows.as_strided((size,), (1,)), self.out.view(-1))


class RankMemory:
    """Memory between an S-rank and one R-rank, or all that it shares none with, in both directions.

    Args:
        dtype: of the tensors in it.
        shared: uint8, to the R-rank and back; empty if they share none.
        memory: where this rank has memory that it does not share.

    Attributes:
        is_shared: whether both ranks see it.
    """

    def __init__(self, dtype: torch.dtype, shared: tuple[Tensor, Tensor], memory: Memory):
        self.is_shared = len(shared[0]) > 0
        self._out, self._back = (_Direction(dtype, each.view(dtype), memory) for each in shared)

    def messages(self, pieces: Sequence[Piece], shape: MixerShape) -> list[Message]:
        """Return pieces of a layer of `shape`, one behind the other, where those of the layer before lay."""
        sizes = [piece.elements(shape) for piece in pieces]
        outs = [len(piece.decode_rows) * shape.out_columns for piece in pieces]
        ways = zip(pieces, self._out.take(sizes), self._back.take(outs), strict=True)
        return [_message(piece, shape, out, back) for piece, out, back in ways]


class _Direction:
    """Memory of one direction: what is shared, and private memory that grows if a layer needs more than that."""

    def __init__(self, dtype: torch.dtype, shared: Tensor, memory: Memory):
        self._shared, self._own, self._memory = shared, torch.empty(0, dtype=dtype), memory

    def take(self, sizes: list[int]) -> list[tuple[Tensor, Buffer]]:
        """Return stretches of so many elements, each with what MPI sends to announce or carry it."""
        total = sum(sizes)
        if total <= len(self._shared):
            return [(stretch, _SIGNAL) for stretch in self._shared[:total].split(sizes)]
        if total > len(self._own):
            self._own = self._memory.empty(total + total // 4, self._own.dtype)
        return [(stretch, _content(stretch)) for stretch in self._own[:total].split(sizes)]


def _content(stretch: Tensor) -> Buffer:
    """Return the message that carries a stretch; MPI takes a tensor on a device by its address there."""
    if not len(stretch):
        return _SIGNAL
    content = stretch.view(torch.uint8)
    return [content.numpy() if content.device.type == "cpu" else content, MPI.BYTE]


def _message(piece: Piece, shape: MixerShape, out: tuple[Tensor, Buffer], back: tuple[Tensor, Buffer]) -> Message:
    n, m = len(piece.decode_rows), len(piece.prefill_rows)
    (memory, qkv), (answered, answer) = out, back
    rows, prompts = memory[: n * shape.row_columns], memory[n * shape.row_columns :]
    return Message(
        piece,
        rows.view(n, shape.row_columns),
        prompts.view(m, prompt_columns(shape)),
        answered.view(n, shape.out_columns),
        qkv,
        answer,
    )


def shared_bytes(shapes: Sequence[MixerShape], slots: int, prefill_tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that a layer takes to an R-rank and back, with so many decode and prompt tokens."""
    out = back = 0
    for s in shapes:
        attends = isinstance(s, LayerShape)
        out = max(out, slots * s.row_columns + prefill_tokens * (prompt_columns(s) if attends else s.row_columns))
        back = max(back, (slots if attends else slots + prefill_tokens) * s.out_columns)
    return out * dtype.itemsize, back * dtype.itemsize


class LaneMemory:
    """The memory of a lane, shared among its ranks of one host. Every rank of the lane makes one, and closes it.

    Attributes:
        ranks: memory between this rank and its peers, by R-rank on the S-rank; of one on an R-rank. Those that share
            none with the S-rank have the same there.
        sync: memory barrier, before a signal is sent and after one has come.
    """

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec):
        self._here = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
        out, back = (-(-size // _ALIGN) * _ALIGN for size in spec.shared_bytes)
        places = comm.group.Translate_ranks(range(comm.size), self._here.group)
        beside_s = places[0] != MPI.UNDEFINED
        shares = comm.rank > 0 and beside_s and spec.device == HOST
        own = out + back if shares and self._enough(out + back) else 0
        self._window = MPI.Win.Allocate_shared(own, 1, comm=self._here)
        if own:  # touched at once: the next lane's look at what is left counts it, and it lies on this rank's node
            torch.frombuffer(self._window.tomemory(), dtype=torch.uint8).zero_()
        wait(self._here.Ibarrier())  # nobody writes there before
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.sync = self._window.Sync
        mine = places[1:] if comm.rank == 0 else [places[comm.rank]]
        segments = [self._segment(place if beside_s else MPI.UNDEFINED, out) for place in mine]
        none = torch.empty(0, dtype=torch.uint8)
        apart = RankMemory(spec.dtype, (none, none), spec.memory)
        self.ranks = [RankMemory(spec.dtype, s, spec.memory) if len(s[0]) else apart for s in segments]
        self._memory, self._pinned = spec.memory, stretches([part for s in segments for part in s])
        for first, last in self._pinned:
            spec.memory.pin(first, last - first)

    def _enough(self, size: int) -> bool:
        """Return whether this host has room for what its ranks take; touching memory that is not there kills."""
        status = os.statvfs(SHARED_MEMORY)
        return 2 * size * self._here.size <= status.f_bavail * status.f_frsize

    def _segment(self, place: int, out: int) -> tuple[Tensor, Tensor]:
        """Return an R-rank's memory, to it and back; empty if there is none."""
        memory = b"" if place == MPI.UNDEFINED else self._window.Shared_query(place)[0]
        whole = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
        return whole[:out], whole[out:]

    def close(self) -> None:
        """Free the shared memory; every rank of the lane calls this."""
        del self.ranks
        for first, _ in self._pinned:
            self._memory.unpin(first)
        self._window.Unlock_all()
        self._window.Free()
        self._here.Free()


def stretches(memories: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the addresses (first, last + 1) of memory, those as one that may share a page: a page is pinned once."""
    found: list[tuple[int, int]] = []
    for first, last in sorted((memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in memories):
        if first == last:
            continue
        if found and first < found[-1][1] + mmap.PAGESIZE:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found
