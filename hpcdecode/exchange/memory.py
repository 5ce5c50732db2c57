"""The memory of a lane between an S-rank and its R-ranks, and the messages about it.

Ranks of one host share it: one writes where the other reads, and a message without content says that it is done.
Between hosts, or if a layer has no room in what is shared, each rank has its own and the message has the content.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.exchange.base import PackedRows
from hpcdecode.exchange.device import Memory, PlainMemory
from hpcdecode.exchange.partition import Partition, RankColumns
from hpcdecode.exchange.shares import Piece, prompt_columns
from hpcdecode.mpi.message import post, receive, send
from hpcdecode.mpi.wait import wait
from hpcdecode.system.memory import available_bytes
from hpcdecode.system.memory_file import Address, mapped, offered

Buffer = list[Any]  # [memory, MPI datatype], as mpi4py takes it

_OFFER = 5  # message tag, beside those of `mpi`
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

    The S-rank offers a file in memory, of which every R-rank beside it takes a stretch. Messages say when a stretch
    has been written: MPI orders the memory of both ranks at their arrival. It has no name that could be left behind,
    and the loss of a rank is seen as at any other message.

    Attributes:
        ranks: memory between this rank and its peers, by R-rank on the S-rank; of one on an R-rank. Those that share
            none with the S-rank have the same there.
    """

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec):
        out, back = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in spec.shared_bytes)
        wholes: list[Tensor | None] = [None] * (comm.size - 1 if comm.rank == 0 else 1)
        if size := out + back:
            wholes = self._offer(comm, size) if comm.rank == 0 else [self._take(comm, size, spec.device)]
        none = torch.empty(0, dtype=torch.uint8)
        apart = RankMemory(spec.dtype, (none, none), spec.memory)
        shared = [None if whole is None else (whole[:out], whole[out:]) for whole in wholes]
        self.ranks = [apart if s is None else RankMemory(spec.dtype, s, spec.memory) for s in shared]
        self._memory, self._pinned = spec.memory, stretches([part for s in shared if s is not None for part in s])
        for first, last in self._pinned:
            spec.memory.pin(first, last - first)

    def _offer(self, comm: MPI.Intracomm, size: int) -> list[Tensor | None]:
        """Return the stretches of `size` bytes of the R-ranks, None for those that take none."""
        r_ranks = range(1, comm.size)
        with ExitStack() as stack:
            offers, whole = list[_Offer](), torch.empty(0, dtype=torch.uint8)
            with suppress(OSError):
                file = stack.enter_context(offered(size * len(r_ranks)))
                whole = mapped(file, 0, size * len(r_ranks))
                offers.append(_Offer(socket.gethostname(), file))
            sent = [post(comm, rank, _OFFER, offers) for rank in r_ranks]
            takers = [receive(comm, rank, _OFFER, bool) for rank in r_ranks]
            for request in sent:
                wait(request)
        return [whole[i * size : (i + 1) * size] if takes else None for i, takes in enumerate(takers)]

    def _take(self, comm: MPI.Intracomm, size: int, device: torch.device) -> Tensor | None:
        """Return this R-rank's stretch of `size` bytes; None if it is on another host, or has no room for it."""
        taken: Tensor | None = None
        for offer in receive(comm, 0, _OFFER, list[_Offer]):
            mates = min(comm.size - 1, os.cpu_count() or 1)  # on this host, at most
            if offer.host == socket.gethostname() and device == HOST and self._enough(size * mates):
                with suppress(OSError):
                    taken = mapped(offer.file, size * (comm.rank - 1), size)
        if taken is not None:
            taken.zero_()  # so that it lies on this rank's node, and the next lane's look at what is left counts it
        send(comm, 0, _OFFER, taken is not None)
        return taken

    def _enough(self, size: int) -> bool:
        """Return whether this host has room for what its ranks take; touching memory that is not there kills."""
        return 2 * size <= available_bytes()

    def close(self) -> None:
        """Let go of the shared memory."""
        del self.ranks
        for first, _ in self._pinned:
            self._memory.unpin(first)


class _Offer(msgspec.Struct, frozen=True):
    """Memory of a lane, and the host that has it."""

    host: str
    file: Address


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
