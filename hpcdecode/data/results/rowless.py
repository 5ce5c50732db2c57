"""Outputs without rows, which a job may replace though they are of another job: nothing is lost but errors."""

from __future__ import annotations

from pathlib import Path

from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.earlier import DAMAGED
from hpcdecode.data.results.segments import segment_files
from hpcdecode.data.results.unfinished import UNFINISHED


def is_rowless(path: Path, parts: Path) -> bool:
    """Return whether an output holds results of a job that are errors alone, and no sequence in flight.

    Args:
        path: The output.
        parts: Its folder of parts, which this process has locked if it exists.
    """
    if (parts / UNFINISHED).exists() or any(parts.glob(f"*{DAMAGED}")):
        return False
    files = [*([path] if path.exists() else []), *segment_files(parts)]
    try:
        return bool(files) and not any(map(_count_rows, files))
    except (OSError, KeyError, RuntimeError, ValueError, TypeError):  # it is damaged, or something else
        return False


def _count_rows(path: Path) -> int:
    with open_segment(path) as file:
        len(file["errors/line"])
        return len(file["rows/line"])
