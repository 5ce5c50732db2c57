"""The lock of an output, so that only one process writes it at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from hpcdecode.errors import UserError

LOCK = "lock"


class Lock:
    """A lock that this process holds on an output until it releases it or ends.

    File systems without locks give none; the object then does nothing.

    Args:
        parts: Folder of parts of the output, which contains the lock file.

    Raises:
        UserError: Another process holds the lock.
    """

    def __init__(self, parts: Path) -> None:
        self._descriptor = os.open(parts / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            if e.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(
                    f"results {parts.with_suffix('')}: another job writes them ({holder}); wait for its end or"
                    " choose another -o"
                ) from e
            self._descriptor = -1
        else:
            with suppress(OSError):  # the disk may be full; the lock needs no name of its holder
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
