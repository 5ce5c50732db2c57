"""`hpcdecode export`: results as JSON Lines, Parquet or the output of an OpenAI batch."""

from __future__ import annotations

import io
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from hpcdecode.data.prompts.tables import optional
from hpcdecode.data.results.layout import COLUMNS, OFFSETS, ROW_COLUMNS, STRING
from hpcdecode.data.results.openai import answers
from hpcdecode.data.results.read import Results, rows_of
from hpcdecode.errors import UserError
from hpcdecode.system.durable import destination, is_stream, replacing, stream, write_errors

FORMATS = {"jsonl": ".results.jsonl", "parquet": ".results.parquet", "openai-batch": ".batch.jsonl"}
_COMPARE = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*")

Stretch = dict[str, np.ndarray]


def export(
    path: str,
    out: str | None,
    kind: str,
    *,
    columns: Sequence[str] | None = None,
    where: Sequence[str] = (),
    endpoint: str = "chat",
    overwrite: bool = False,
) -> Path:
    """Write the rows of a results file that meet all conditions `where`, in order; returns the file written.

    columns: None for all. where: such as `finish_reason=stop` or `line>=100`. endpoint: of the requests that an OpenAI
    batch answers; rows that could not be used are lines with an `error`. out: a new file, one to `overwrite`, a FIFO,
    or - for standard output. Raises UserError for unknown columns, conditions and files, and BrokenPipeError.
    """
    name = out or Path(path).with_suffix(FORMATS[kind]).name
    tests = [_condition(text) for text in where]
    with _opened(name, path, overwrite) as file, Results(path) as results, write_errors(name, "free some space"):
        if kind == "parquet" and file.isatty():
            raise UserError("-o -: expected a file or a pipe for Parquet, got a terminal; redirect it, or use -o FILE")
        wanted = results.columns if columns is None or kind == "openai-batch" else tuple(columns)
        _require_columns([*wanted, *(name for name, _ in tests)], results.columns)
        stretches = _selected(results, wanted, tests)
        if kind == "parquet":
            _write_parquet(_Counted(file), stretches, wanted, name)
        else:
            lines = _jsonl(stretches) if kind == "jsonl" else answers(results, _jsonl(stretches), endpoint)
            file.writelines(msgspec.json.encode(line, enc_hook=_plain) + b"\n" for line in lines)
        file.flush()
    return Path(name)


@contextmanager
def _opened(name: str, source: str, overwrite: bool) -> Iterator[IO[bytes]]:
    """What is written to: standard output, a FIFO, or a file that takes the place of `name` at the end."""
    if is_stream(name):
        with stream(name) as file:
            yield file
        return
    target = destination(name)
    if target.exists() and (not overwrite or (os.path.exists(source) and os.path.samefile(target, source))):
        raise UserError(f"{name}: exists already; use --overwrite to replace it, or choose another -o")
    with write_errors(name, "free some space"), replacing(target) as file:
        yield file


class _Counted(io.RawIOBase):
    """A stream that knows how much went into it, as Parquet asks; pipes do not."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._position = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position


def _selected(results: Results, columns: Sequence[str], tests: Sequence[tuple[str, Callable]]) -> Iterator[Stretch]:
    needed = dict.fromkeys([*columns, *(name for name, _ in tests)])
    for stretch in results.stretches(list(needed)):
        keep = np.ones(len(next(iter(stretch.values()))), bool)
        for name, test in tests:
            keep &= test(stretch[name])
        yield {name: stretch[name][keep] for name in columns}


def _condition(text: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    match = _CONDITION.fullmatch(text)
    if not match:
        raise UserError(f"--where {text}: expected COLUMN, one of {' '.join(_COMPARE)}, and a value")
    name, sign, value = match.groups()
    if name not in ROW_COLUMNS:
        raise UserError(f"--where {text}: expected a column of {', '.join(ROW_COLUMNS)}, got {name!r}")
    if ROW_COLUMNS[name].dtype is not STRING and name != "finish_reason":
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"--where {text}: expected a number for {name}, got {value!r}") from None
    return name, lambda values: np.asarray(_COMPARE[sign](values, value), bool)


def _require_columns(columns: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in columns if name not in known]
    if unknown or not columns:
        raise UserError(f"expected some of the columns {', '.join(known)}, got {', '.join(unknown) or 'none'}")


def _jsonl(stretches: Iterator[Stretch]) -> Iterator[dict[str, Any]]:
    for stretch in stretches:
        yield from rows_of(stretch)


def _plain(value: Any) -> Any:
    return value.tolist()  # numpy's scalars and arrays


def _write_parquet(file: _Counted, stretches: Iterator[Stretch], columns: Sequence[str], target: str) -> None:
    pyarrow, parquet = (optional(m, target, "parquet") for m in ("pyarrow", "pyarrow.parquet"))
    schema = pyarrow.schema([(name, _arrow_type(name, pyarrow)) for name in columns])
    with parquet.ParquetWriter(file, schema) as writer:
        for stretch in stretches:
            lists = {name: [_lists(v) for v in stretch[name]] if name in OFFSETS else stretch[name] for name in columns}
            arrays = [pyarrow.array(lists[f.name], f.type, from_pandas=False) for f in schema]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _arrow_type(name: str, pyarrow: Any) -> Any:
    column = COLUMNS[name]
    if column.dtype is STRING or name == "finish_reason":
        return pyarrow.string()
    kind = pyarrow.from_numpy_dtype(column.dtype)
    kind = pyarrow.list_(kind) if name in OFFSETS else kind
    return pyarrow.list_(kind) if column.wide else kind


def _lists(values: np.ndarray | None) -> Any:
    """Of arrays of more than one dimension, which Arrow does not take."""
    return values if values is None or values.ndim == 1 else list(values)
