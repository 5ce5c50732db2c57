"""Files in memory without a name, which processes of one host and user open by the process that made them."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import torch
from torch import Tensor

_NAME = "hpcdecode-"


class Address(msgspec.Struct, frozen=True):
    """Where other processes of the host and the user find a file in memory.

    Attributes:
        process: Id of the process that made it.
        descriptor: The file there.
        name: Name of the file, by which others know that it is this one.
    """

    process: int
    descriptor: int
    name: str


class MemoryFile:
    """A file in memory. Close it once all that is needed of it has been mapped.

    Args:
        descriptor: The file, which this object owns.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    @classmethod
    def open(cls, address: Address) -> MemoryFile:
        """Open a file that a process of this host offers.

        Raises:
            OSError: If there is no such file, as in a container of its own.
        """
        descriptor = os.open(f"/proc/{address.process}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{address.name} (deleted)":
            os.close(descriptor)
            raise OSError(f"process {address.process} is another one here")
        return cls(descriptor)

    def mapped(self, start: int, nbytes: int, *, huge: bool = False) -> Tensor:
        """Return a stretch of the file, uint8 [nbytes], from a multiple of the page size on.

        It stays until no process uses it. It takes memory where it has been written, and on the NUMA node of the
        thread that wrote there first.

        Args:
            start: Offset.
            nbytes: Size.
            huge: Ask for huge pages, which the kernel may not have; the next stretch may share one.

        Raises:
            OSError: If the address space does not have that much.
        """
        memory = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED, offset=start)
        with suppress(OSError):
            if huge:
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@contextmanager
def offered(nbytes: int) -> Iterator[Address]:
    """Make a file of `nbytes` for others, and this process, to open inside the block.

    Raises:
        OSError: If the system or a limit does not allow it.
    """
    name = _NAME + secrets.token_hex(16)
    descriptor = os.memfd_create(name)
    try:
        os.truncate(descriptor, nbytes)
        yield Address(os.getpid(), descriptor, name)
    finally:
        os.close(descriptor)


def mapped(address: Address, start: int, nbytes: int) -> Tensor:
    """Return a stretch of a file that a process of this host offers, as `MemoryFile.mapped` does.

    Raises:
        OSError: If there is no such file, or the address space does not have that much.
    """
    file = MemoryFile.open(address)
    try:
        return file.mapped(start, nbytes)
    finally:
        file.close()
