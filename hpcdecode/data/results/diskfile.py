"""Opens finished HDF5 files for reading, and writes new ones to disks that may become full.

HDF5 cannot close a file after a failed write: the identifier stays open, and the process may crash when it ends.
Therefore HDF5 writes to a `DiskFile`, which keeps in memory what the disk refused and reports the error afterwards.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import h5py

from hpcdecode.data.results.seal import seal_file
from hpcdecode.system.durable import fresh, publish

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

CACHE_BYTES = 1 << 18  # of chunks per dataset: one chunk of any column; HDF5's default is 8 MB


def open_segment(path: Path) -> h5py.File:
    """Open a finished file of this package for reading, without locks and with small caches."""
    return h5py.File(path, "r", locking=False, rdcc_nbytes=CACHE_BYTES)


@contextmanager
def new_file(temporary: Path, path: Path, job: str | None = None) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Open a new file for writing, which durably replaces `path` when the block ends without an exception.

    Args:
        temporary: Name of the file until then.
        path: The final name.
        job: Name of the job to seal the file for (see seal.py); None for no seal.

    Yields:
        The open file, and a function that raises the OSError of the first refused write. Call it regularly, since
        refused writes are kept in memory. The end of the block calls it, too.
    """
    try:
        with DiskFile(temporary) as disk:
            with h5py.File(disk, "w", rdcc_nbytes=CACHE_BYTES) as file:
                yield file, disk.check
            disk.check()
            if job is not None:
                disk.seal(job)
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class DiskFile(io.RawIOBase):
    """A new file whose writes never fail: the first write that the disk refuses and all later ones stay in memory.

    Args:
        path: Name of the file; a file with this name is removed.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = fresh(path)
        self._position = self._end = 0
        self._refused: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []  # position and data; a later entry overwrites an earlier one

    def check(self) -> None:
        """Raise the OSError of the first write that the disk refused, if there is one."""
        if self._refused is not None:
            raise self._refused

    def seal(self, job: str) -> None:
        """Append a seal for the job named `job`. Raises OSError if the disk refuses it."""
        seal_file(self._descriptor, self._end, job)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, and return it."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`, to memory if the disk refuses, and return its length in bytes."""
        view = memoryview(data).cast("B")
        if self._refused is None:
            try:
                self._write_all(view)
            except OSError as e:
                self._refused = e
        if self._refused is not None:
            self._kept.append((self._position, bytes(view)))
        self._position += len(view)
        self._end = max(self._end, self._position)
        return len(view)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the whole buffer and return its length. Bytes that were never written are zero."""
        view = memoryview(buffer).cast("B")
        data = os.pread(self._descriptor, len(view), self._position)
        view[:] = data.ljust(len(view), b"\0")
        for position, kept in self._kept:
            start, stop = max(position, self._position), min(position + len(kept), self._position + len(view))
            if start < stop:
                view[start - self._position : stop - self._position] = kept[start - position : stop - position]
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the length of the file to `size` bytes, or to the position, and return it."""
        self._end = self._position if size is None else size
        if self._refused is None:
            try:
                os.ftruncate(self._descriptor, self._end)
            except OSError as e:
                self._refused = e
        return self._end

    def flush(self) -> None:
        """Do nothing, since nothing is buffered."""

    def _write_all(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self._position + done)
