"""Finds the earlier run of a job at its output, and checks that it is a run of the same job."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import msgspec

from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.earlier import EarlierRun
from hpcdecode.data.results.identity import differences, job_name, kept_before
from hpcdecode.data.results.lock import Lock
from hpcdecode.data.results.rowless import is_rowless
from hpcdecode.data.results.segments import parts_folder, segment_files
from hpcdecode.errors import UserError
from hpcdecode.system.durable import destination, write_errors


def find_earlier(
    path: str | os.PathLike[str], identity: dict[str, Any], *, overwrite: bool, limit: int | None = None
) -> EarlierRun | None:
    """Return the earlier run to resume at an output, or None if the job begins anew.

    A job begins anew in place of another one that has no rows.

    Args:
        path: The output.
        identity: The identity of the job; see identity.py.
        overwrite: Whether the job begins anew in place of an earlier run.
        limit: Number of rows of the prompt files that the job takes; None for all. An output that is complete for
            fewer rows is resumed.

    Raises:
        UserError: The output cannot be written, is in use, is damaged, or has the rows of another job.
    """
    target = destination(path, "results ")
    with write_errors(os.fspath(path), "make it readable"):
        return _find(target, parts_folder(target), identity, overwrite, limit)


def columns_kept(path: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """Return which input columns the results at an output keep; None if that cannot be read, or there are none."""
    with suppress(OSError, KeyError, RuntimeError, ValueError, TypeError), open_segment(Path(path)) as file:
        return kept_before(msgspec.json.decode(file.attrs["identity"]))
    return None


def _find(path: Path, parts: Path, identity: dict[str, Any], overwrite: bool, limit: int | None) -> EarlierRun | None:
    if path.exists() and path.stat().st_size and not h5py.is_hdf5(path):
        advice = "remove it, and it is made again from the rows in " + str(parts) if segment_files(parts) else ""
        raise UserError(
            f"results {path}: expected an HDF5 file to continue or replace, got another;"
            f" {advice or 'choose another -o'}"
        )
    if overwrite or not (path.exists() or segment_files(parts)):
        return None
    lock = Lock(parts) if parts.exists() else None
    try:
        found = _load(EarlierRun(path, job_name(identity), lock=lock), identity, limit)
        if found is None and lock:
            lock.release()
        return found
    except BaseException:
        if lock:
            lock.release()
        raise


def _load(earlier: EarlierRun, identity: dict[str, Any], limit: int | None) -> EarlierRun | None:
    """Return the run with its rows loaded, or None if it is of another job and has none.

    Raises:
        UserError: There are rows of another job.
    """
    path, parts = earlier.path, earlier.parts
    _restore_output(path, parts)
    try:
        output = _Output(path)
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as e:
        if not segment_files(parts):
            raise UserError(
                f"results {path}: expected the results of an earlier run of this job, got: {e};"
                " use --overwrite to start anew, or choose another -o"
            ) from e
        earlier.warnings.append(f"{path}: cannot be read ({e}); it is made again from the rows in {parts}")
        earlier.load_segments(0)
        return earlier
    changed = list(differences(output.identity, identity))
    if changed and is_rowless(path, parts):
        return None
    if changed:
        raise UserError(
            f"results {path}: holds the rows of another job: {'; '.join(changed)};"
            " use --overwrite to start anew without them, or choose another -o"
        )
    if output.has_rows:
        earlier.load_file(complete=output.complete and output.covers(limit), limit=output.limit)
    else:
        if output.shown and not segment_files(parts):
            raise UserError(
                f"results {path}: expected its rows in {parts}, found none; move them there, use --overwrite to start "
                "anew without them, or choose another -o"
            )
        earlier.load_segments(output.shown)
    return earlier


class _Output:
    """The state of an output file.

    Args:
        path: Path of the file.

    Attributes:
        shown: Number of its rows and errors.
        complete: Whether its job was complete.
        has_rows: Whether the rows are in the file itself; else it is an index.
        identity: The identity of its job.
        limit: Number of rows of the prompt files that it covers if it is complete; None for all.

    Raises:
        Exception: It is not a results file, or damaged; h5py and msgspec raise exceptions of many types.
    """

    def __init__(self, path: Path) -> None:
        with open_segment(path) as file:
            lines = file["rows/line"], file["errors/line"]
            self.shown = sum(map(len, lines))
            own = not any(dataset.is_virtual for dataset in lines)
            self.complete = bool(file.attrs["complete"]) and own
            self.has_rows = self.complete or (own and self.shown > 0)
            self.identity: Any = msgspec.json.decode(file.attrs["identity"])
            job = msgspec.json.decode(file.attrs.get("job", "null"))
        limit = job.get("limit") if isinstance(job, dict) else None
        self.limit: int | None = limit if isinstance(limit, int) else None

    def covers(self, limit: int | None) -> bool:
        """Return whether a complete file has all rows of a job that takes `limit` of them."""
        return self.limit is None or (limit is not None and limit <= self.limit)


def _restore_output(path: Path, parts: Path) -> None:
    """Undo the renaming of the output to the first segment, if a run ended between that and its first index."""
    first = parts / "seg-00000001-00000001.h5"
    if path.exists() or not first.exists():
        return
    with suppress(OSError), open_segment(first) as file:
        if "complete" not in file.attrs:
            return
        first.rename(path)
