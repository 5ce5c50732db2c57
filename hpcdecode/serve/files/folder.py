"""The folder in which a server keeps the files and batches of its clients."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hpcdecode.data.results.lock import Lock
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable
from hpcdecode.serve.files.store import FileStore
from hpcdecode.system import kept


def data_folder(path: str | None, port: int) -> DataFolder:
    """Return the folder of a server.

    Args:
        path: The one that it is told; without it, servers have their own, by their ports.
        port: Its port; with any one (0) a folder is not found again, and is removed when it is closed.

    Raises:
        UserError: It cannot be used.
    """
    if path or port:
        return DataFolder(Path(path) if path else kept.directory() / "serve" / str(port))
    return DataFolder(Path(tempfile.mkdtemp(prefix="hpcdecode-serve-")), temporary=True)


class DataFolder:
    """A folder that this process alone uses until it is closed.

    Args:
        path: The folder, which is made if it is not there.
        temporary: Remove it in the end.

    Attributes:
        files: The files of the clients.
        batches: Where the states and results of batches are.

    Raises:
        UserError: It cannot be used.
    """

    def __init__(self, path: Path, temporary: bool = False):
        self._path, self._temporary = path, temporary
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path)
            self.batches = path / "batches"
            self.files = FileStore(path / "files")
        except OSError as e:
            raise UserError(f"--data-dir {path}: expected a folder that can be written, got: {printable(e)}") from e

    def close(self) -> None:
        """Let other processes use it; a second call does nothing."""
        if self._temporary:
            shutil.rmtree(self._path, ignore_errors=True)
        self._lock.release()


def _locked(path: Path) -> Lock:
    try:
        return Lock(path)
    except UserError as e:
        holder = str(e).partition("(")[2].partition(")")[0]
        raise UserError(
            f"--data-dir {path}: expected a folder of this server's own, got one that another server uses ({holder});"
            " choose another --data-dir"
        ) from e
