"""`hpcdecode show OUT.h5 [LINE ...]`: rows of a results file as text."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import h5py
import numpy as np

from hpcdecode.errors import UserError

_FIRST = 5  # rows shown if no line is named


def show(path: str, lines: Seq[int] = ()) -> Iterator[str]:
    """The rows of the prompt file's `lines`, or the first ones; UserError if the file is not one of results."""
    try:
        with h5py.File(path) as file:
            yield _heading(path, file)
            for index in _indices(file["rows/line"][:], lines):
                yield _row(file["rows"], index)
            for index in _indices(file["errors/line"][:], lines):
                line, identity, reason = (file["errors"][name][index] for name in ("line", "id", "reason"))
                yield f"\n--- line {line}, id {identity.decode()}: error: {reason.decode()}"
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: expected a results file of hpcdecode generate: {error}") from error


def _heading(path: str, file: h5py.File) -> str:
    state = "complete" if file.attrs["complete"] else "not complete"
    return f"{path}: {len(file['rows/line'])} rows, {len(file['errors/line'])} errors, {state}"


def _indices(present: np.ndarray, lines: Seq[int]) -> Iterator[int]:
    yield from np.flatnonzero(np.isin(present, lines)) if lines else range(min(_FIRST, len(present)))


def _row(rows: h5py.Group, index: int) -> str:
    reasons = {number: name for name, number in h5py.check_enum_dtype(rows["finish_reason"].dtype).items()}
    tokens = rows["token_offsets"][index + 1] - rows["token_offsets"][index]
    reason, identity = reasons[int(rows["finish_reason"][index])], rows["id"][index].decode()
    head = f"line {rows['line'][index]}, id {identity}, {rows['prompt_tokens'][index]} + {tokens} tokens, {reason}"
    return f"\n--- {head}\n{rows['text'][index].decode()}"
