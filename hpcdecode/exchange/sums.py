"""What the members of a group add up, over MPI: MPI moves, and the additions are ours.

Shares are added in the order of the members and in float32, so that the bits of a sum depend on the number of members
alone. An `Iallreduce` does not promise that: its order may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.exchange.tensors import bytes_of

_GRAIN = 64  # elements; members add up whole grains


class MpiSums:
    """The sums of one lane of a group. All members start the same ones in the same order.

    Args:
        comm: of the members, in their order.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm = comm
        self._memory = torch.empty(_GRAIN, dtype=torch.uint8)  # for shares of others
        self._under_way: tuple[Tensor, ...] = ()  # what MPI may read and write, also if the work is given up

    def add(self, share: Tensor) -> Generator[MPI.Request, None, Tensor]:
        """Yield each request to wait for; return the sum of all members' shares.

        Args:
            share: of this member, of any shape, that all members have; in memory of the host or a device.
        """
        flat = share.detach().contiguous().flatten().cpu()
        total = torch.empty_like(flat)
        size, dtype, members = flat.element_size(), flat.dtype, self.comm.size
        counts = _dealt(len(flat), members)
        own = int(counts[self.comm.rank])
        if len(self._memory) < own * members * size:
            self._memory = torch.empty(own * members * size, dtype=torch.uint8)
        came = self._memory.view(dtype)[: own * members].view(members, own)
        sent = [bytes_of(flat), _layout(counts * size), MPI.BYTE]
        self._under_way = flat, total
        yield self.comm.Ialltoallv(sent, [bytes_of(came), _layout(np.full(members, own * size)), MPI.BYTE])
        first, *others = came
        part = first.float()
        for other in others:
            part += other
        mine = part.to(dtype)
        self._under_way = mine, total
        yield self.comm.Iallgatherv([bytes_of(mine), MPI.BYTE], [bytes_of(total), _layout(counts * size), MPI.BYTE])
        return total.view(share.shape).to(share.device)

    def gather(self, part: Tensor, columns: NDArray[np.int64]) -> Generator[MPI.Request, None, list[Tensor]]:
        """Yield the request to wait for; return all members' parts on the first, nothing on the others.

        Args:
            part: of this member, [rows, its columns].
            columns: of every member.
        """
        flat = part.detach().contiguous().cpu()
        sizes = columns * len(flat) * flat.element_size()
        if self.comm.rank > 0:
            yield self.comm.Igatherv([bytes_of(flat), MPI.BYTE], None)
            return []
        came = np.empty(sizes.sum(), np.uint8)
        yield self.comm.Igatherv([bytes_of(flat), MPI.BYTE], [came, _layout(sizes), MPI.BYTE])
        parts = torch.from_numpy(came).view(flat.dtype).split((columns * len(flat)).tolist())
        return [each.view(len(flat), -1).to(part.device) for each in parts]


def _dealt(elements: int, members: int) -> NDArray[np.int64]:
    """Return how many elements every member adds up, whole grains but for the last."""
    grains = -(-elements // _GRAIN)
    ends = np.minimum(np.arange(1, members + 1) * grains // members * _GRAIN, elements)
    return np.diff(ends, prepend=0)


def _layout(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sizes and places of parts that lie one after the other, as MPI takes them."""
    return sizes, np.cumsum(sizes) - sizes
