"""What a results file holds of each row, and how rows of two files differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdecode.data.results.layout import OFFSETS, RAGGED

Mix = dict[str, Any]
Contents = dict[str, dict[str, Any]]  # columns of "rows" and of "errors", by name


def contents(path: Path) -> Contents:
    """All that a complete results file holds of rows and errors, but the times."""
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        return {
            group: {name: data[:] for name, data in file[group].items() if not name.endswith("_at")}
            for group in ("rows", "errors")
        }


def difference(mix: Mix, whole: Contents, alone: dict[int, Contents], tolerance: float) -> str:
    """How rows in company differ from those alone; empty if they do not.

    Args:
        whole: of the job.
        alone: by line.
        tolerance: most that log-probabilities may differ.
    """
    found = []
    for line in range(1, len(mix["rows"]) + 1):
        one = alone[line]
        for group in ("rows", "errors"):
            mine, own = of_line(whole, group, line), of_line(one, group, line)
            for name in sorted(mine.keys() | own.keys()):
                if not same(mine.get(name), own.get(name), tolerance):
                    found.append(f"line {line}: {name}: {mine.get(name)!r} in company, {own.get(name)!r} alone")
    lines = set(whole["rows"]["line"].tolist()) | set(whole["errors"]["line"].tolist())
    if lines != set(range(1, len(mix["rows"]) + 1)):
        found.append(f"lines {sorted(lines)}")
    return "\n".join(found)


def of_line(held: Contents, group: str, line: int) -> dict[str, Any]:
    """The columns of a line's samples, without what fills up columns that only other rows have values for."""
    columns = held[group]
    rows = np.flatnonzero(columns["line"] == line)
    cut: dict[str, Any] = {}
    for name, values in columns.items():
        if name in RAGGED:
            continue
        if group == "errors" or name not in OFFSETS:
            cut[name] = values[rows]
        else:
            ends = columns[OFFSETS[name]]
            cut[name] = [_held(values[ends[row] : ends[row + 1]]) for row in rows]
    return {name: value for name, value in cut.items() if not _nothing(value)}


def _held(values: np.ndarray) -> np.ndarray:
    """Entries without the columns in which no token has a value."""
    if values.ndim == 1:
        return values
    missing = np.isnan(values) if values.dtype.kind == "f" else values == -1
    return values[:, ~missing.all(axis=0)]


def _nothing(value: Any) -> bool:
    parts = [np.asarray(part) for part in (value if isinstance(value, list) else [value])]
    return all(
        part.size == 0 or bool(np.isnan(part).all() if part.dtype.kind == "f" else _empty(part)) for part in parts
    )


def _empty(texts: np.ndarray) -> bool:
    """Whether they are texts without a character, such as of prompts that are token ids."""
    return texts.dtype == object and not any(texts)


def same(mine: Any, own: Any, tolerance: float) -> bool:
    """Whether two columns are equal; floats may differ by `tolerance`."""
    if mine is None or own is None:
        return mine is own
    if isinstance(mine, list):
        return len(mine) == len(own) and all(same(a, b, tolerance) for a, b in zip(mine, own, strict=True))
    if mine.shape != own.shape:
        return False
    if mine.dtype.kind != "f":
        return bool((mine == own).all())
    return bool(np.allclose(mine, own, rtol=0, atol=tolerance, equal_nan=True))
