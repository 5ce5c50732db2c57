"""Reads the rows of a results file in the order of the prompt file: `hpcdecode.read(path)`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcdecode.data.results.checked import checked_offsets, open_results, read_attribute, reading
from hpcdecode.data.results.input_reader import InputReader, pick
from hpcdecode.data.results.layout import (
    ADAPTER,
    COLUMNS,
    ERROR_COLUMNS,
    FINISH_REASONS,
    OFFSETS,
    PACKED,
    PARSED,
    RAGGED,
    TOKENS,
)
from hpcdecode.data.results.strings import STRING
from hpcdecode.errors import UserError
from hpcdecode.requests.output_parser import ToolCall

_BATCH_ROWS = 4096  # read at once
_BATCH_BYTES = 64 << 20  # of the file on average, if its rows are large
_REASONS = np.array(sorted(FINISH_REASONS, key=FINISH_REASONS.__getitem__), dtype=np.object_)


class Results:
    """An open results file, of a job that is complete, running or interrupted. It is a context manager.

        with hpcdecode.read("out.h5") as results:
            print(len(results), results[7]["text"])

    Args:
        path: The output of `hpcdecode generate`.

    Attributes:
        complete: Whether the job has ended with all its rows.
        attributes: About the job: `job`, `identity`, `model`, `versions`, `topology`, `summary`.
        columns: Names of the columns in the file. Those of log-probabilities exist if a row asked for them. The last
            ones are the prompt's text and the input columns; an input column with the name of another one has
            `input.` before its name.
        sources: Segments of an unfinished job.
        inputs: Reads the input columns.

    Raises:
        UserError: The file is not a results file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._file, self.sources = open_results(path)
        with self._reading():
            self._rows = rows = self._file["rows"]
            self._offsets = {name: rows[name] for name in RAGGED if name in rows}
            self.complete = bool(self._file.attrs["complete"]) and not self.sources
            self.attributes = {k: read_attribute(self._file, k) for k in self._file.attrs if k != "complete"}
            line, sample = rows["line"][:], rows["sample"][:]
            self.inputs = InputReader(self._file)
        self.columns = (*(name for name in COLUMNS if name in rows and name != PACKED), *self.inputs.names)
        self._order = np.lexsort((sample, line))  # an interrupted job's rows lie in the order of their commits
        self._lines = line[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "not complete"
        return f"<Results of {os.fspath(self._path)!r}: {len(self):,} rows, {state}>"

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of the job, such as `seconds` and `tokens_per_second`; empty while its first run goes on."""
        found = self.attributes.get("summary")
        return dict(found) if isinstance(found, dict) else {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows by line and sample, in the form of `[line]`."""
        for columns in self.batches():
            yield from rows_of(columns)

    def __getitem__(self, line: int) -> dict[str, Any]:
        """Return the first sample of a line, as a dict of its values by column.

        `token_ids`, `prompt_token_ids` and log-probabilities are arrays [tokens]. Values of the most likely tokens are
        arrays [tokens, k]. Both are None if the row did not ask for them. Values of input columns are those of the
        prompt file, as Python values; None if the row had none. Parts of a text that are not there are None, as is
        `adapter` of rows that chose no adapter, and `tool_calls` are lists of dicts in the form of the OpenAI API.

        Raises:
            KeyError: There is no such row.
        """
        samples = self.samples(line)
        if not samples:
            raise KeyError(f"line {line} is not among the {len(self)} rows")
        return samples[0]

    def samples(self, line: int) -> list[dict[str, Any]]:
        """Return all samples of a line in the form of `[line]`, or none if there is no such row."""
        return list(rows_of(self._columns(self.columns, *self._span(line, line))))

    def count(self, first: int, last: int) -> int:
        """Return the number of rows of the lines `first` to `last`, both included."""
        start, stop = self._span(first, last)
        return max(stop - start, 0)

    def between(self, first: int, last: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of the lines `first` to `last`, both included, in the form of `[line]`."""
        start, stop = self._span(first, last)
        for begin in range(start, stop, count := self._batch_rows()):
            yield from rows_of(self._columns(self.columns, begin, min(begin + count, stop)))

    def by_id(self, row_id: str) -> dict[str, Any]:
        """Return the first row with an id. It reads all ids.

        Raises:
            KeyError: There is no such row.
        """
        found = np.flatnonzero(self.column("id") == row_id)
        if len(found) == 0:
            raise KeyError(f"id {row_id!r} is not among the {len(self)} rows")
        return self[int(self._lines[found[0]])]

    def column(self, name: str) -> np.ndarray:
        """Return a column of all rows, [rows]: numbers, str objects, or arrays for columns of tokens.

        Raises:
            KeyError: There is no such column.
        """
        if name not in self.columns:
            raise KeyError(f"{name!r} is not among the columns {', '.join(self.columns)}")
        return self._columns([name], 0, len(self))[name]

    def token_counts(self) -> np.ndarray:
        """Return the number of generated tokens of all rows, [rows] int64, without reading the tokens."""
        with self._reading():
            counts: np.ndarray = np.diff(checked_offsets(self._offsets[TOKENS][:], self._path))
            return counts[self._order]

    def batches(self, names: Sequence[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Yield columns by name, some thousand rows at a time.

        Args:
            names: Names of the columns; None for all.
        """
        names = self.columns if names is None else names
        for start in range(0, len(self), count := self._batch_rows()):
            yield self._columns(names, start, min(start + count, len(self)))

    def errors(self) -> list[dict[str, Any]]:
        """Return the rows that could not be used, sorted by line, as dicts of `line`, `id` and `reason`.

        If columns are kept, `input` is a dict of those that could be read.
        """
        with self._reading():
            group = self._file["errors"]
            columns = {
                name: (group[name].asstr(errors="replace") if column.dtype is STRING else group[name])[:]
                for name, column in ERROR_COLUMNS.items()
                if name in group
            }
            if "input" in columns:
                columns["input"] = [msgspec.json.decode(text or "{}") for text in columns["input"]]
        order = np.argsort(columns["line"], kind="stable")
        return [{name: values[i] for name, values in columns.items()} for i in order]

    def error_reasons(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield lines [m] int64 and reasons [m] str of some thousand rows at a time that could not be used."""
        with self._reading():
            lines, reasons = self._file["errors/line"], self._file["errors/reason"].asstr(errors="replace")
        for start in range(0, len(lines), _BATCH_ROWS):
            with self._reading():
                batch = lines[start : start + _BATCH_ROWS], reasons[start : start + _BATCH_ROWS]
            yield batch

    def pandas(self) -> Any:
        """Return all rows as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = importlib.import_module("pandas")
        return pandas.DataFrame({name: self.column(name) for name in self.columns})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Return where the rows of the lines `first` to `last` begin and end."""
        return int(np.searchsorted(self._lines, first, "left")), int(np.searchsorted(self._lines, last, "right"))

    def _batch_rows(self) -> int:
        """Return how many rows to read at once."""
        size = sum(path.stat().st_size for path in self.sources or [Path(self._path)])
        return max(1, min(_BATCH_ROWS, _BATCH_BYTES * len(self) // max(size, 1)))

    def _base(self, name: str) -> int:
        """Return the first offset of a column, which is not 0 in a segment."""
        return int(self._offsets[OFFSETS[name]][0])

    def _columns(self, names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        """Return columns of the rows from `start` to `stop`, in the order of the prompt file."""
        index = self._order[start:stop]
        with self._reading():
            columns = {name: self._own(name, index) for name in names if name not in self.inputs.names}
            wanted = [name for name in names if name in self.inputs.names]
            if wanted and self.inputs.packed:
                rows = self._entries(PACKED, index)
                columns |= self.inputs.of_packed(wanted, [b"" if row is None else row.tobytes() for row in rows])
            elif wanted:
                columns |= {name: self.inputs.of_final(name, index) for name in wanted}
            return {name: columns[name] for name in names}

    def _own(self, name: str, index: np.ndarray) -> np.ndarray:
        return self._entries(name, index) if name in OFFSETS else self._take(name, index)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise UserError if the file is damaged, or a segment was removed, since HDF5 shows zeros in its place."""
        with reading(self._path):
            yield
        gone = [source for source in self.sources if not source.exists()]
        if gone:
            raise UserError(f"{self._path}: {gone[0]} has gone, as the job went on; open the results again")

    def _take(self, name: str, index: np.ndarray) -> np.ndarray:
        strings, dataset = COLUMNS[name].dtype is STRING, self._rows[name]
        values = pick(dataset.asstr(errors="replace") if strings else dataset, index)
        if name == "finish_reason":
            values = _REASONS[values]
        if name in PARSED or name == ADAPTER:
            parts = [text or None for text in values.tolist()]
            calls = (text and msgspec.json.decode(text, type=list[ToolCall]) for text in parts)
            values = np.fromiter(calls if name == "tool_calls" else parts, object, len(parts))
        return values

    def _entries(self, name: str, index: np.ndarray) -> np.ndarray:
        """Return the entries of rows in a column of tokens, [rows] object: an array or None each."""
        out = np.empty(len(index), dtype=object)
        if len(index) == 0:
            return out
        stored, first, last = self._offsets[OFFSETS[name]], int(index.min()), int(index.max())
        if last - first >= 2 * len(index):  # the rows are scattered: one read a row
            for i, row in enumerate(index):
                start, stop = checked_offsets(stored[row : row + 2], self._path) - self._base(name)
                out[i] = _values(name, self._rows[name][start:stop])
            return out
        offsets = checked_offsets(stored[first : last + 2], self._path) - self._base(name)
        entries = self._rows[name][offsets[0] : offsets[-1]]
        for i, row in enumerate(index - first):
            out[i] = _values(name, entries[offsets[row] - offsets[0] : offsets[row + 1] - offsets[0]])
        return out


def _values(name: str, values: np.ndarray) -> np.ndarray | None:
    """Return the entries of a row, [tokens] or [tokens, k], without those it did not ask for; None if it has none."""
    column = COLUMNS[name]
    if column.fill is None:
        return values
    lacking = np.isnan(values) if np.isnan(column.fill) else values == column.fill
    if not column.wide:
        return None if lacking.all() else values
    width = int((~lacking).sum(axis=1).max(initial=0))
    return values[:, :width] if width else None


def rows_of(columns: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yield the rows of columns of equal length, as dicts of their values by column, plain Python ones."""
    plain = (values if values.dtype == object else values.tolist() for values in columns.values())
    for values in zip(*plain, strict=True):
        yield dict(zip(columns, values, strict=True))
