"""What the members of a group add up, over MPI: MPI moves, and the additions are ours.

Shares are added in the order of the members and in float32, so that the bits of a sum depend on the number of members
alone. An `Iallreduce` does not promise that: its order may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.exchange.own_rows import OwnRows
from hpcdecode.exchange.tensors import bytes_of
from hpcdecode.mpi.wait import Waitable

Ints = NDArray[np.int64]
_GRAIN = 64  # elements; members add up whole grains
_AT_ONCE_BYTES = 1 << 19  # of the others' shares; one collective of so many is faster than two of fewer


class Sums(Protocol):
    """The sums of one lane of a group. All members start the same ones in the same order.

    Attributes:
        comm: Of the members, in their order.
        member: This member's number.
        sent_bytes: Bytes of shares and sums that this member sent to others.
        whole_bytes: What these would be if every row of every share were sent.
    """

    comm: MPI.Intracomm
    member: int
    sent_bytes: int
    whole_bytes: int

    def add(self, share: Tensor, rows: OwnRows | None = None) -> Generator[Waitable, None, Tensor]:
        """Yield each request to wait for; return the sum of all members' shares.

        Args:
            share: Of this member, of any shape, that all members have; in memory of the host or a device.
            rows: Of a share [..., T, columns], the rows of every member's that can be other than zeros.
        """

    def gather(self, part: Tensor, columns: Ints) -> Generator[Waitable, None, list[Tensor]]:
        """Yield the request to wait for; return all members' parts on the first, nothing on the others.

        Args:
            part: Of this member, [rows, its columns].
            columns: Of every member.
        """


class MpiSums:
    """Sums by collectives of MPI, in memory of the host.

    Args:
        comm: of the members, in their order.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.member = comm, comm.rank
        self.sent_bytes = self.whole_bytes = 0
        self._memory = torch.empty(_GRAIN, dtype=torch.uint8)  # for shares of others
        self._under_way: tuple[Tensor, ...] = ()  # what MPI may read and write, also if the work is given up

    def add(self, share: Tensor, rows: OwnRows | None = None) -> Generator[Waitable, None, Tensor]:
        """Yield each request to wait for; return the sum of all members' shares (see `Sums`)."""
        x, members = share.detach().contiguous().cpu(), self.comm.size
        self.whole_bytes += sent_by_all(x, members)
        way = "all" if rows is None or not x.numel() else rows.way
        if way == "columns" and at_once(x, members):
            way = "rows"
        if rows is None or way == "all":
            total = yield from self._add_all(x)
        elif way == "rows":
            total = yield from self._add_rows(x.view(rows.tokens, -1), rows)
        else:
            total = yield from self._add_columns(x.view(rows.tokens, -1), rows)
        return total.view(share.shape).to(share.device)

    def _add_all(self, x: Tensor) -> Generator[Waitable, None, Tensor]:
        """Each member adds up a part of the elements, and all gather the parts; of few elements each adds up all."""
        flat, members = x.flatten(), self.comm.size
        if at_once(flat, members):
            return (yield from self._add_at_once(flat))
        total = torch.empty_like(flat)
        size, dtype = flat.element_size(), flat.dtype
        counts = dealt(len(flat), members)
        own = int(counts[self.comm.rank])
        if len(self._memory) < own * members * size:
            self._memory = torch.empty(own * members * size, dtype=torch.uint8)
        came = self._memory.view(dtype)[: own * members].view(members, own)
        sent = [bytes_of(flat), _layout(counts * size), MPI.BYTE]
        self._under_way = flat, total
        yield self.comm.Ialltoallv(sent, [bytes_of(came), _layout(np.full(members, own * size)), MPI.BYTE])
        mine = in_order(came).to(dtype)
        self._under_way = mine, total
        yield self.comm.Iallgatherv([bytes_of(mine), MPI.BYTE], [bytes_of(total), _layout(counts * size), MPI.BYTE])
        self.sent_bytes += (len(flat) - own + (members - 1) * own) * size
        return total

    def _add_at_once(self, flat: Tensor) -> Generator[Waitable, None, Tensor]:
        """Each member gets the shares of all, and adds all up: one message."""
        came = torch.empty(self.comm.size, len(flat), dtype=flat.dtype)
        self._under_way = flat, came
        yield self.comm.Iallgather([bytes_of(flat), MPI.BYTE], [bytes_of(came), MPI.BYTE])
        self.sent_bytes += (self.comm.size - 1) * flat.nbytes
        return in_order(came).to(flat.dtype)

    def _add_rows(self, x: Tensor, rows: OwnRows) -> Generator[Waitable, None, Tensor]:
        """Each member gets the rows of all, and adds all up: one message."""
        width = x.shape[1] * x.element_size()
        own = rows.of(self.comm.rank, x)
        came = torch.empty(int(rows.counts.sum()), x.shape[1], dtype=x.dtype)
        self._under_way = own, came
        yield self.comm.Iallgatherv([bytes_of(own), MPI.BYTE], [bytes_of(came), _layout(rows.counts * width), MPI.BYTE])
        self.sent_bytes += (self.comm.size - 1) * own.nbytes
        return rows.added(came.split(rows.counts.tolist())).to(x.dtype)

    def _add_columns(self, x: Tensor, rows: OwnRows) -> Generator[Waitable, None, Tensor]:
        """Each member gets some columns of the rows of all and adds them up, and all gather the columns."""
        rank, members, size = self.comm.rank, self.comm.size, x.element_size()
        columns = dealt(x.shape[1], members)
        own = int(columns[rank])
        flat = by_columns(rows.of(rank, x), columns)
        came = torch.empty(int(rows.counts.sum()) * own, dtype=x.dtype)
        self._under_way = flat, came
        yield self.comm.Ialltoallv(
            [bytes_of(flat), _layout(rows.counts[rank] * columns * size), MPI.BYTE],
            [bytes_of(came), _layout(rows.counts * own * size), MPI.BYTE],
        )
        parts = zip(came.split((rows.counts * own).tolist()), rows.counts.tolist(), strict=True)
        mine = rows.added([part.view(count, own) for part, count in parts]).to(x.dtype)
        total = torch.empty(x.numel(), dtype=x.dtype)
        self._under_way = mine, total
        layout = _layout(len(x) * columns * size)
        yield self.comm.Iallgatherv([bytes_of(mine), MPI.BYTE], [bytes_of(total), layout, MPI.BYTE])
        self.sent_bytes += flat.nbytes - int(rows.counts[rank]) * own * size + (members - 1) * mine.nbytes
        return side_by_side(total, len(x), columns)

    def gather(self, part: Tensor, columns: Ints) -> Generator[Waitable, None, list[Tensor]]:
        """Yield the request to wait for; return all parts on the first member (see `Sums`)."""
        flat = part.detach().contiguous().cpu()
        sizes = columns * len(flat) * flat.element_size()
        if self.comm.rank > 0:
            yield self.comm.Igatherv([bytes_of(flat), MPI.BYTE], None)
            return []
        came = np.empty(sizes.sum(), np.uint8)
        yield self.comm.Igatherv([bytes_of(flat), MPI.BYTE], [came, _layout(sizes), MPI.BYTE])
        parts = torch.from_numpy(came).view(flat.dtype).split((columns * len(flat)).tolist())
        return [each.view(len(flat), -1).to(part.device) for each in parts]


def in_order(shares: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the sum of shares, one after the other, in float32."""
    first, *others = shares
    total = first.float()
    for other in others:
        total += other
    return total


def dealt(elements: int, members: int) -> Ints:
    """Return how many elements every member adds up, whole grains but for the last."""
    grains = -(-elements // _GRAIN)
    ends = np.minimum(np.arange(1, members + 1) * grains // members * _GRAIN, elements)
    return np.diff(ends, prepend=0)


def at_once(x: Tensor, members: int) -> bool:
    """Return whether members send each other whole shares, since these are small, and each adds all up."""
    return (members - 1) * x.nbytes <= _AT_ONCE_BYTES


def sent_by_all(x: Tensor, members: int) -> int:
    """Return the bytes that a member sends on average if all of a share are sent: K - 1 or 2 (K - 1) / K of it."""
    return (members - 1) * x.nbytes if at_once(x, members) else 2 * (members - 1) * x.nbytes // members


def by_columns(x: Tensor, columns: Ints) -> Tensor:
    """Return [rows, columns] as runs of columns, each dense, one after the other."""
    return torch.cat([run.reshape(-1) for run in x.split(columns.tolist(), 1)])


def side_by_side(flat: Tensor, rows: int, columns: Ints) -> Tensor:
    """Return runs of columns that lie one after the other as [rows, columns]."""
    parts = zip(flat.split((rows * columns).tolist()), columns.tolist(), strict=True)
    return torch.cat([part.view(rows, count) for part, count in parts], 1)


def _layout(sizes: Ints) -> tuple[Ints, Ints]:
    """Return sizes and places of parts that lie one after the other, as MPI takes them."""
    return sizes, np.cumsum(sizes) - sizes
