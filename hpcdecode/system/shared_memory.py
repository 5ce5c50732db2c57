"""Memory that processes of a host share: each fills a part of it, all of them read the whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from hpcdecode.system.cgroup import read
from hpcdecode.system.memory import HUGE_PAGE, huge_zeros
from hpcdecode.system.memory_file import Address, MemoryFile, offered

_MOST_BYTES = 1 << 46  # of a file, which takes memory only where it has been written

Fill = Callable[[Tensor], None]  # writes uint8 [nbytes], which is zeros


def shares_huge_pages() -> bool:
    """Return whether the system has huge pages for files in memory that ask for them."""
    chosen = re.search(r"\[(\w+)\]", read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    return chosen is not None and chosen[1] not in ("never", "deny")


class WeightMemory(Protocol):
    """Where weights are put that are made at load."""

    def filled(self, nbytes: int, fill: Fill, beside: Tensor | None = None) -> Tensor:
        """Return memory with what `fill` writes, uint8 [nbytes], once all processes that share it are done loading.

        Args:
            nbytes: Size.
            fill: Called by the one process that makes it.
            beside: Other memory of this kind that `fill` reads, which is ready for it.
        """


class PrivateMemory:
    """Memory of this process alone."""

    def filled(self, nbytes: int, fill: Fill, beside: Tensor | None = None) -> Tensor:
        """Return memory with what `fill` writes, uint8 [nbytes]."""
        made = huge_zeros(nbytes)
        fill(made)
        return made


class SharedMemory:
    """Memory of several processes, which ask for the same sizes in the same order. Close it once all have loaded.

    Each piece is made by the process that has made the fewest bytes so far.

    Args:
        file: In memory, which this object owns.
        place: Number of this process among those that share it.
        count: Number of processes.

    Attributes:
        shares: Bytes that each of the processes is to make of what was asked for.
        made: Bytes that this one has made.
    """

    def __init__(self, file: MemoryFile, place: int, count: int):
        self._file, self._place = file, place
        self.shares, self.made = [0] * count, 0
        self._makers: dict[int, int] = {}  # by address
        self._end = 0

    @staticmethod
    def offered() -> AbstractContextManager[Address]:
        """Make a file in memory for others to open inside the block.

        Raises:
            OSError: If the system or a limit does not allow it.
        """
        return offered(_MOST_BYTES)

    @classmethod
    def open(cls, address: Address, place: int, count: int) -> SharedMemory:
        """Open a file in memory that a process of this host offers.

        Raises:
            OSError: If there is no such file, as in a container of its own.
        """
        return cls(MemoryFile.open(address), place, count)

    def filled(self, nbytes: int, fill: Fill, beside: Tensor | None = None) -> Tensor:
        """Return memory with what `fill` writes in one of the processes, uint8 [nbytes], once all are done loading."""
        start, self._end = self._end, self._end + -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        made = self._file.mapped(start, nbytes, huge=True)
        fewest = self.shares.index(min(self.shares))
        maker = (
            fewest if beside is None else self._makers.get(beside.data_ptr(), fewest)
        )  # what another one has is whole
        self._makers[made.data_ptr()] = maker
        self.shares[maker] += nbytes
        if maker == self._place:
            fill(made)
            self.made += nbytes
        return made

    def close(self) -> None:
        """Close the file. What has been made stays until no process uses it."""
        self._file.close()
