"""Files that are either complete or absent, whenever the machine stops, and the places they may be written to."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hpcdecode.errors import UserError

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")  # names of standard output
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def destination(path: str | os.PathLike[str], what: str = "", instead: str = "choose another -o") -> Path:
    """Return the file that `path` names, links followed.

    The file need not exist, but its directory must.

    Args:
        path: Name of the file to write.
        what: Begin of an error message, such as `results `.
        instead: End of an error message.

    Raises:
        UserError: If `path` is neither a regular file nor a new name in an existing directory.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            expected = f"expected an existing directory {target.parent}, found none"
            raise UserError(f"{what}{path}: {expected}; create it") from None
        return target
    except (OSError, ValueError) as e:
        cause = getattr(e, "strerror", None) or e
        raise UserError(f"{what}{path}: expected the name of a file that can be written: {cause}; {instead}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{what}{path}: expected a file name, got {_KINDS[stat.S_IFMT(mode)]}; {instead}")
    return Path(os.path.realpath(path))


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is standard output or a FIFO, which are written to directly."""
    if str(path) in STDOUT:
        return True
    with suppress(OSError, ValueError):
        return stat.S_ISFIFO(os.stat(path).st_mode)
    return False


@contextmanager
def stream(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open standard output or a FIFO, for which `is_stream` is true, for writing."""
    if str(path) in STDOUT:
        yield sys.stdout.buffer
        sys.stdout.flush()
    else:
        with open(path, "wb") as file:
            yield file


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which durably replaces `target` when the block ends without an exception.

    Args:
        target: A path from `destination`.
    """
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with open(fresh(temporary), "wb") as file:
            yield file
        publish(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to a temporary file beside `path` and rename it to `path`; durable on return.

    Raises:
        OSError: If the file system refuses.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(fresh(temporary), "wb") as file:
            file.write(data)
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def fresh(path: Path) -> int:
    """Return a descriptor of a new file for reading and writing. A file that has the name already is removed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file on the same file system to `path`; durable on return.

    Raises:
        OSError: If the file system refuses, or `path` exists and is not a regular file.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "is no regular file, and only those are replaced", str(path))
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems cannot sync a directory and need not
            raise
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: Path | str, advice: str = "rows committed before are kept; free some space") -> Iterator[None]:
    """Turn errors of the file system and of HDF5 into a UserError that names the output, the cause and the remedy.

    BrokenPipeError passes unchanged: it says that the reader of standard output has ended.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, RuntimeError) as e:
        cause = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else str(e).splitlines()[0]
        raise UserError(f"results {path}: writing failed: {cause}; {advice} or choose another -o") from e
