"""Files that are either there in full or not at all, whenever the machine stops."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcdecode.errors import UserError


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` by way of a temporary name beside it; durable on return. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file on the same file system to `path`, replacing what was there; durable on return."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems cannot sync a directory, and need not
            raise
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: Path, advice: str = "rows committed before are kept; free some space") -> Iterator[None]:
    """Turn what the disk or HDF5 refuses into a UserError that names the output, the cause and what to do."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        cause = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else str(e).splitlines()[0]
        raise UserError(f"results {path}: writing failed: {cause}; {advice} or choose another -o") from e
