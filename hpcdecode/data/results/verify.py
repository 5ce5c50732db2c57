"""Verifies the segments that an earlier run left on disk: each is whole, damaged, or of another job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcdecode.data.results.checked import check_own
from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.identity import job_name
from hpcdecode.data.results.seal import Damaged, sealed_for
from hpcdecode.data.results.segments import Segment, describe, live, segment_files
from hpcdecode.data.results.structure import Unsound
from hpcdecode.errors import UserError


def verified(parts: Path, job: str) -> tuple[list[Segment], list[Path]]:
    """Read the live segments in a folder of parts completely.

    Args:
        parts: The folder.
        job: Name of the job.

    Returns:
        The live segments that are whole, in the order of their commits, and the damaged files.

    Raises:
        UserError: A segment belongs to another job.
        OSError: A segment cannot be read.
    """
    usable, whole = set(segment_files(parts)), set[Path]()
    damaged: list[Path] = []
    while unverified := [path for path in live(usable) if path not in whole]:
        for path in unverified:
            if _is_whole(path, job):
                whole.add(path)
            else:  # the segments that were merged into it may still exist; without it they are live
                damaged.append(path)
                usable.remove(path)
    return [describe(path) for path in live(usable)], damaged


def _is_whole(path: Path, job: str) -> bool:
    """Return whether a segment is whole. Raises UserError if it belongs to another job, OSError if it is unreadable."""
    try:
        owner = sealed_for(path)
        with open_segment(path) as file:
            if not check_own(file):
                raise Unsound("it refers to other files")
            if owner is None and "identity" in file.attrs:  # it was a final file
                owner = job_name(msgspec.json.decode(file.attrs["identity"]))
    except (Damaged, Unsound, KeyError, RuntimeError, ValueError, TypeError, OverflowError):
        return False
    except OSError as e:
        if e.errno:  # an error of the file system; the file may be whole
            raise
        return False
    if owner is not None and owner != job:
        raise UserError(f"{path}: expected rows of this job, got those of another; move the file away")
    return True
