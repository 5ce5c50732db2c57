"""Segments as they are found on disk: whole, damaged, or of another job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcdecode.data.results.checked import Unsound, check_own
from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.seal import Damaged, job_name, sealed_for
from hpcdecode.data.results.segments import Segment, describe, in_force, segment_files
from hpcdecode.errors import UserError


def verified(parts: Path, job: str) -> tuple[list[Segment], list[Path]]:
    """Read the segments in force in a folder of parts, from their first bytes to their last.

    Returns:
        The segments in force, in the order of their commits, and the damaged files, whose rows are in none of them.

    Raises:
        UserError: a segment belongs to another job.
        OSError: one cannot be read.
    """
    left, whole, damaged = set(segment_files(parts)), set(), []
    while skipped_queries := [path for path in in_force(left) if path not in whole]:
        for path in skipped_queries:
            if _is_whole(path, job):
                whole.add(path)
            else:  # those that were merged into it may be there still
                damaged.append(path)
                left.remove(path)
    return [describe(path) for path in in_force(left)], damaged


def _is_whole(path: Path, job: str) -> bool:
    try:
        owner = sealed_for(path)
        with open_segment(path) as file:
            if not check_own(file):
                raise Unsound("it refers to other files")
            if owner is None and "identity" in file.attrs:  # a final file, taken up
                owner = job_name(msgspec.json.decode(file.attrs["identity"]))
    except (Damaged, Unsound, KeyError, RuntimeError, ValueError, TypeError, OverflowError):
        return False
    except OSError as e:
        if e.errno:  # the system's: the file may be whole
            raise
        return False
    if owner is not None and owner != job:
        raise UserError(f"{path}: expected rows of this job, got those of another; move the file away")
    return True
