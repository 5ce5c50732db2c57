"""Tiers of memory below that of a KV cache: a file on a local disk, or more memory of the host.

A tier has chunks of one size, which it writes and reads as a whole.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hpcdecode.errors import UserError
from hpcdecode.system.sizes import parse_bytes
from hpcdecode.system.throttled_tier import ThrottledTier
from hpcdecode.system.tier import Chunk, Tier

if TYPE_CHECKING:
    from typing_extensions import Self

ALIGNMENT = 4096  # bytes, of what O_DIRECT reads and writes
_FORMS = "host:SIZE or nvme:DIRECTORY:SIZE, such as host:64G or nvme:/scratch:1T, with @RATE behind it or not"


class TierSpec(msgspec.Struct, frozen=True):
    """A tier as users ask for it.

    Attributes:
        kind: `host` or `nvme`.
        size: Bytes that an R-rank may take of it.
        directory: Of the file, for `nvme`.
        rate: Most bytes that move in a second; 0 for any number.
    """

    kind: str
    size: int
    directory: str = ""
    rate: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the tier that a text such as `nvme:/scratch:1T` or `host:64G@2G` names, or raise ValueError."""
        whole, at, limit = text.rpartition("@") if re.search(r"@[^:/]*$", text) else (text, "", "")
        kind, _, rest = whole.partition(":")
        directory, _, size = rest.rpartition(":") if kind == "nvme" else ("", "", rest)
        if kind not in ("host", "nvme"):
            raise ValueError(f"expected {_FORMS}; got the tier {kind!r} in {text!r}")
        if kind == "nvme" and not directory:
            raise ValueError(f"expected {_FORMS}; got {text!r}, which lacks the directory or the size")
        try:
            nbytes = parse_bytes(size)
        except ValueError:
            raise ValueError(f"expected {_FORMS}; got {text!r}, whose size is {size!r}") from None
        if nbytes < 1:
            raise ValueError(f"expected {_FORMS}; got {text!r}, which has no room")
        try:
            rate = parse_bytes(limit) if at else 0
        except ValueError:
            rate = 0
        if at and rate < 1:
            raise ValueError(f"expected {_FORMS}; got {text!r}, whose bytes a second are {limit!r}")
        return cls(kind, nbytes, directory, rate)


class HostTier:
    """Memory of this host, taken as it is used.

    Args:
        size: Bytes at most.
        chunk_bytes: Bytes of a chunk.
        allocate: Returns memory of so many bytes; None for any memory.
    """

    def __init__(self, size: int, chunk_bytes: int, allocate: Callable[[int], Chunk] | None = None):
        self.chunks = size // chunk_bytes
        self._chunk_bytes, self._allocate = chunk_bytes, allocate or _memory
        self._held: dict[int, Chunk] = {}

    def reserve(self) -> None:
        """Do nothing: whether the host has so much is known before."""

    def write(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Copy a chunk to memory."""
        np.copyto(self.memory(chunk)[at : at + len(data)], data)

    def memory(self, chunk: int) -> Chunk:
        """Return the memory of a chunk, uint8 [chunk_bytes], for a device to copy to and from."""
        if chunk not in self._held:
            self._held[chunk] = self._allocate(self._chunk_bytes)
        return self._held[chunk]

    def read(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Copy a chunk back."""
        np.copyto(data, self._held[chunk][at : at + len(data)])

    def close(self) -> None:
        """Give the memory back."""
        self._held.clear()


class FileTier:
    """A file without a name, so that nothing of it is left whatever becomes of the process.

    It is read and written past the page cache where the file system allows that.

    Args:
        directory: Of the file.
        size: Bytes at most.
        chunk_bytes: Bytes of a chunk, a multiple of `ALIGNMENT`.

    Attributes:
        direct: Whether it goes past the page cache.

    Raises:
        OSError: If there can be no file.
    """

    def __init__(self, directory: str, size: int, chunk_bytes: int):
        self.chunks = size // chunk_bytes
        self._chunk_bytes = chunk_bytes
        self._file, name = tempfile.mkstemp(prefix=".hpcdecode-kv-", dir=directory)
        try:
            self.direct = self._reopen(name)
        finally:
            os.unlink(name)

    def _reopen(self, name: str) -> bool:
        """Open the file past the page cache, if a block can be written so; return whether it can."""
        with suppress(OSError):
            direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.pwrite(direct, memory_for(ALIGNMENT).data, 0)
            except OSError:
                os.close(direct)
                raise
            os.close(self._file)
            self._file = direct
            return True
        return False

    def reserve(self) -> None:
        """Have the file system give the file all its room."""
        os.posix_fallocate(self._file, 0, self.chunks * self._chunk_bytes)

    def write(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Write a chunk to its place in the file."""
        at, left = chunk * self._chunk_bytes + at, data.data
        while left:
            count = os.pwrite(self._file, left, at)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            at, left = at + count, left[count:]

    def read(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Read a chunk from its place."""
        at, left = chunk * self._chunk_bytes + at, data.data
        while left:
            count = os.preadv(self._file, [left], at)
            if count == 0:
                raise OSError(errno.EIO, "the file ends before its chunk does")
            at, left = at + count, left[count:]

    def close(self) -> None:
        """Close the file, which frees its room."""
        os.close(self._file)


def _memory(nbytes: int) -> Chunk:
    return np.empty(nbytes, np.uint8)


def memory_for(nbytes: int) -> Chunk:
    """Return memory that O_DIRECT can read and write: uint8 [nbytes], in pages of its own."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to what O_DIRECT takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def open_tiers(
    specs: Sequence[TierSpec], chunk_bytes: int, host_bytes: int, allocate: Callable[[int], Chunk] | None = None
) -> list[Tier]:
    """Open tiers, in order.

    Args:
        specs: As users ask for them.
        chunk_bytes: Bytes of a chunk.
        host_bytes: Memory of the host in all.
        allocate: Returns memory of this host of so many bytes; None for any memory.

    Raises:
        UserError: If one cannot be opened.
    """
    opened = [(spec, _open_tier(spec, chunk_bytes, host_bytes, allocate)) for spec in specs]
    return [ThrottledTier(tier, spec.rate) if spec.rate else tier for spec, tier in opened]


def _open_tier(spec: TierSpec, chunk_bytes: int, host_bytes: int, allocate: Callable[[int], Chunk] | None) -> Tier:
    if spec.kind == "host":
        if spec.size > host_bytes:
            raise UserError(
                f"--kv-swap host: expected at most {host_bytes >> 20}M, the memory of this host, got "
                f"{spec.size >> 20}M; lower it, or use nvme:DIRECTORY:SIZE"
            )
        return HostTier(spec.size, chunk_bytes, allocate)
    try:
        return FileTier(spec.directory, spec.size, chunk_bytes)
    except OSError as error:
        raise UserError(
            f"--kv-swap nvme:{spec.directory}: expected a directory to write to on every host with R-ranks, got: "
            f"{error.strerror}; create it, or name another"
        ) from error
