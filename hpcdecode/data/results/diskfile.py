"""New HDF5 files on disks that may fill up.

HDF5 cannot close a file once a write to it failed: the identifier stays open, and the process may crash at its end.
So it writes here by way of an object that keeps what the disk refused in memory, and tells afterwards.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from hpcdecode.data.results.seal import seal_file
from hpcdecode.system.durable import fresh, publish

CACHE_BYTES = 1 << 18  # per dataset, enough for one chunk of any column; HDF5's own choice costs 8 MB a dataset


def open_segment(path: Path) -> h5py.File:
    """A finished file of this package, to be read: without locks, as nobody writes it, and with small caches."""
    return h5py.File(path, "r", locking=False, rdcc_nbytes=CACHE_BYTES)


@contextmanager
def new_file(temporary: Path, path: Path, job: str | None = None) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """A file to be filled as `temporary`, which replaces `path` durably when the block ends well.

    job: seals the file for a job (seal.py). Also gives a check to call now and then, as memory grows after the disk
    refused a write: it raises the OSError of that write, as does the end of the block.
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
    """A new file whose writes never fail: from the first that the disk refuses on, they are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._descriptor = fresh(path)
        self._position = self._end = 0
        self._refused: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []  # position, data; later ones win

    def check(self) -> None:
        """Raise the OSError of the first write that the disk refused, if any."""
        if self._refused is not None:
            raise self._refused

    def seal(self, job: str) -> None:
        """Seal what was written. Raises OSError."""
        seal_file(self._descriptor, self._end, job)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def write(self, data: bytes | memoryview) -> int:
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

    def readinto(self, buffer: memoryview) -> int:
        """Fill the whole buffer, with zeros where nothing was written."""
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
        self._end = self._position if size is None else size
        if self._refused is None:
            try:
                os.ftruncate(self._descriptor, self._end)
            except OSError as e:
                self._refused = e
        return self._end

    def flush(self) -> None:
        """Nothing is buffered."""

    def _write_all(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self._position + done)
