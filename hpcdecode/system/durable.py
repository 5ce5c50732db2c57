"""Files that are either there in full or not at all, whenever the machine stops, and where they may be put."""

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


def destination(path: str | os.PathLike, what: str = "", instead: str = "choose another -o") -> Path:
    """Follow links from `path` to the file that is to be written; it need not exist, its directory must.

    Args:
        what: begins the message of an error, such as `results `.
        instead: ends it.

    Raises:
        UserError: `path` names anything but a regular file or a new name in a directory.
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


def is_stream(path: str | os.PathLike) -> bool:
    """Whether `path` is standard output or a FIFO, which are written to directly."""
    if str(path) in STDOUT:
        return True
    with suppress(OSError, ValueError):
        return stat.S_ISFIFO(os.stat(path).st_mode)
    return False


@contextmanager
def stream(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Standard output or a FIFO (`is_stream`), to be written to."""
    if str(path) in STDOUT:
        yield sys.stdout.buffer
        sys.stdout.flush()
    else:
        with open(path, "wb") as file:
            yield file


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file to be filled, which replaces `target`, a `destination`, durably when the block ends well."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with open(fresh(temporary), "wb") as file:
            yield file
        publish(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` by way of a temporary name beside it; durable on return. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(fresh(temporary), "wb") as file:
            file.write(data)
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def fresh(path: Path) -> int:
    """Descriptor of a new file, to be read and written; what an earlier run left under its name is removed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file on the same file system to `path`; durable on return.

    Raises OSError, also where `path` is anything but a regular file, which alone is ever replaced.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "is no regular file, and only those are replaced", str(path))
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems cannot sync a directory, and need not
            raise
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: Path | str, advice: str = "rows committed before are kept; free some space") -> Iterator[None]:
    """Turn what the disk or HDF5 refuses into a UserError that names the output, the cause and what to do.

    A reader of standard output that has gone is no error of the disk: BrokenPipeError passes.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, RuntimeError) as e:
        cause = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else str(e).splitlines()[0]
        raise UserError(f"results {path}: writing failed: {cause}; {advice} or choose another -o") from e
