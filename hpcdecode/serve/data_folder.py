"""The folder in which a server keeps the files and batches of its clients."""

from __future__ import annotations

from pathlib import Path

from hpcdecode.data.results.lock import Lock
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable
from hpcdecode.serve.file_store import FileStore
from hpcdecode.system import kept


def default_folder(port: int) -> Path:
    """Return the folder of a server that is told none: servers of a machine have their own, by their ports."""
    return kept.directory() / "serve" / str(port)


class DataFolder:
    """A folder that this process alone uses until it is closed.

    Args:
        path: The folder, which is made if it is not there.

    Attributes:
        files: The files of the clients.
        batches: Where the states and results of batches are.

    Raises:
        UserError: It cannot be used.
    """

    def __init__(self, path: Path):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path)
            self.batches = path / "batches"
            self.files = FileStore(path / "files")
        except OSError as e:
            raise UserError(f"--data-dir {path}: expected a folder that can be written, got: {printable(e)}") from e

    def close(self) -> None:
        """Let other processes use it."""
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
