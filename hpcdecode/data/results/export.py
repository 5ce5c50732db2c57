"""The command `hpcdecode export`: writes results as JSON Lines, CSV, Parquet or the output of an OpenAI batch."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.results.input_reader import InputReader
from hpcdecode.data.results.layout import COLUMNS, OFFSETS
from hpcdecode.data.results.openai_batch import answers
from hpcdecode.data.results.read import Results, rows_of
from hpcdecode.data.results.strings import STRING
from hpcdecode.data.results.where import accepted, conditions_of
from hpcdecode.errors import UserError
from hpcdecode.system.durable import destination, is_stream, replacing, stream, write_errors

FORMATS = {
    "jsonl": ".results.jsonl",
    "csv": ".results.csv",
    "parquet": ".results.parquet",
    "openai-batch": ".batch.jsonl",
}
_ENDINGS = {".batch.jsonl": "openai-batch", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]  # columns of equal length by name


def export(
    path: str,
    out: str | None,
    kind: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: Sequence[str] = (),
    endpoint: str = "chat",
    overwrite: bool = False,
) -> Path:
    """Write rows of a results file to another file, and return its path.

    Args:
        path: The results file.
        out: A new file, a FIFO, or `-` for standard output. By default the name of the results file with another
            ending.
        kind: A key of FORMATS; None for the one that the ending of `out` names.
        columns: Columns to write; None for all.
        where: Conditions that rows must meet, such as `finish_reason=stop` or `label=yes`.
        endpoint: Endpoint of the requests that an OpenAI batch answers: `chat` or `completions`. Rows that could not
            be used become answers with an `error`.
        overwrite: Whether a file with the name `out` is replaced.

    Raises:
        UserError: A column, condition or file cannot be used.
        BrokenPipeError: The reader of standard output or of the FIFO has ended.
    """
    kind = kind or _kind_of(out)
    name = out or Path(path).with_suffix(FORMATS[kind]).name
    with _opened(name, path, overwrite) as file, Results(path) as results, write_errors(name, "free some space"):
        if not results.complete:
            logger.warning(f"hpcdecode: warning: {path} is not complete: the rows that are done so far are written")
        if kind == "parquet" and file.isatty():
            raise UserError("-o -: expected a file or a pipe for Parquet, got a terminal; redirect it, or use -o FILE")
        wanted = results.columns if columns is None or kind == "openai-batch" else tuple(columns)
        _require_columns(wanted, results.columns)
        batches = accepted(results, conditions_of(where, results), wanted)
        if kind == "parquet":
            _write_parquet(_Counted(file), batches, wanted, name, results.inputs)
        elif kind == "csv":
            _write_csv(file, batches, wanted)
        else:
            lines = _rows(batches) if kind == "jsonl" else answers(results, _rows(batches), endpoint)
            file.writelines(msgspec.json.encode(line, enc_hook=_plain) + b"\n" for line in lines)
        file.flush()
    return Path(name)


def _kind_of(out: str | None) -> str:
    """Return the format that the ending of a file names. Raises UserError if it names none."""
    kind = next((kind for ending, kind in _ENDINGS.items() if out is not None and out.endswith(ending)), None)
    if kind is None:
        raise UserError(f"expected --to {', '.join(FORMATS)}, or -o FILE with one of the endings {', '.join(_ENDINGS)}")
    return kind


@contextmanager
def _opened(name: str, source: str, overwrite: bool) -> Iterator[IO[bytes]]:
    """Open standard output, a FIFO, or a file that replaces `name` when the block ends without an exception.

    Args:
        name: Name of the output.
        source: The results file, which is never replaced.
        overwrite: Whether a file with this name is replaced.
    """
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
    """A stream that counts the bytes written, since Parquet asks for its position, which pipes do not have."""

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


def _require_columns(columns: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in columns if name not in known]
    if unknown or not columns:
        raise UserError(f"expected some of the columns {', '.join(known)}, got {', '.join(unknown) or 'none'}")


def _rows(batches: Iterator[Batch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from rows_of(batch)


def _write_csv(file: IO[bytes], batches: Iterator[Batch], columns: Sequence[str]) -> None:
    """Write rows as CSV in UTF-8: None is empty; lists, objects and truth values are JSON text."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    for batch in batches:
        writer.writerows([_cell(row[name]) for name in columns] for row in rows_of(batch))
        file.write(text.getvalue().encode("utf-8", "replace"))
        text.seek(0)
        text.truncate()
    file.write(text.getvalue().encode("utf-8", "replace"))


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)):
        return value
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _plain(value: Any) -> Any:
    """Return a scalar or array of numpy as Python values, which JSON has."""
    return value.tolist()


def _write_parquet(
    file: _Counted, batches: Iterator[Batch], columns: Sequence[str], target: str, inputs: InputReader
) -> None:
    pyarrow, parquet = (import_extra(m, target, "parquet") for m in ("pyarrow", "pyarrow.parquet"))
    types = {name: _input_type(name, inputs, pyarrow) for name in columns if name in inputs.names}
    schema = pyarrow.schema([(name, types.get(name) or _arrow_type(name, pyarrow)) for name in columns])
    mixed = [name for name in types if inputs.value_dtype(name) is None]
    mixed += [name for name in columns if name == "tool_calls"]
    with parquet.ParquetWriter(file, schema) as writer:
        for batch in batches:
            values = {name: [_lists(v) for v in batch[name]] if name in OFFSETS else batch[name] for name in columns}
            values |= {name: [_text(v) for v in batch[name]] for name in mixed}
            arrays = [pyarrow.array(values[field.name], field.type, from_pandas=False) for field in schema]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _input_type(name: str, inputs: InputReader, pyarrow: Any) -> Any:
    """Return the Arrow type of an input column: that of its values if they agree but for missing ones, else text."""
    dtype = inputs.value_dtype(name)
    return pyarrow.string() if dtype is None or dtype is STRING else pyarrow.from_numpy_dtype(dtype)


def _text(value: Any) -> str | None:
    """Return a value as JSON text; None stays a missing one."""
    return None if value is None else msgspec.json.encode(value).decode()


def _arrow_type(name: str, pyarrow: Any) -> Any:
    column = COLUMNS[name]
    if column.dtype is STRING or name == "finish_reason":
        return pyarrow.string()
    kind = pyarrow.from_numpy_dtype(column.dtype)
    kind = pyarrow.list_(kind) if name in OFFSETS else kind
    return pyarrow.list_(kind) if column.wide else kind


def _lists(values: np.ndarray | None) -> Any:
    """Return an array [tokens, k] as a list of arrays, since Arrow accepts arrays of one dimension only."""
    return values if values is None or values.ndim == 1 else list(values)
