"""Results back from an HDF5 file, in the order of the prompt file: `hpcdecode.read(path)`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpcdecode.data.results.checked import ends_checked, open_results, read_attribute, reading
from hpcdecode.data.results.layout import COLUMNS, ERROR_COLUMNS, FINISH_REASONS, OFFSETS, RAGGED, STRING
from hpcdecode.errors import UserError

_STRETCH = 4096  # rows read at once
_REASONS = np.array(sorted(FINISH_REASONS, key=FINISH_REASONS.get), dtype=object)


class Results:
    """A results file, complete or of a job that runs or was interrupted; usable as a context.

    path: the output of `hpcdecode generate`. complete: whether the job has ended. attributes: what it was (`job`,
    `model`, `versions`, `topology`, `summary`). columns: those that the file has; `logprobs` and its like are there if
    a row asked for them. Raises UserError where the file is none of results.

        with hpcdecode.read("out.h5") as results:
            print(len(results), results[7]["text"])
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self._path = path
        self._file, self.sources = open_results(path)  # segments, of an unfinished job
        with self._reading():
            self._rows = rows = self._file["rows"]
            self._ends = {name: rows[name] for name in RAGGED if name in rows}
            self.complete = bool(self._file.attrs["complete"]) and not self.sources
            self.attributes = {k: read_attribute(self._file, k) for k in self._file.attrs if k != "complete"}
            line, sample = rows["line"][:], rows["sample"][:]
        self.columns = tuple(name for name in COLUMNS if name in rows)
        self._order = np.lexsort((sample, line))  # an interrupted job's rows lie in the order of their commits
        self._lines = line[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows by line and sample, as `[line]` gives them."""
        for columns in self.stretches():
            yield from rows_of(columns)

    def __getitem__(self, line: int) -> dict[str, Any]:
        """The first sample of a line: every column by name. KeyError if it is not there.

        `token_ids`, `prompt_token_ids` and log-probabilities are arrays [tokens], those of the most likely tokens
        [tokens, k]; None where the row did not ask for them.
        """
        samples = self.samples(line)
        if not samples:
            raise KeyError(f"line {line} is not among the {len(self)} rows")
        return samples[0]

    def samples(self, line: int) -> list[dict[str, Any]]:
        """All samples of a line, as `[line]` gives the first; none where the line is not there. Reads no other rows."""
        start, stop = (int(np.searchsorted(self._lines, line, side)) for side in ("left", "right"))
        return list(rows_of(self._columns(self.columns, start, stop)))

    def by_id(self, row_id: str) -> dict[str, Any]:
        """The first row of that id; reads all ids. KeyError if there is none."""
        found = np.flatnonzero(self.column("id") == row_id)
        if len(found) == 0:
            raise KeyError(f"id {row_id!r} is not among the {len(self)} rows")
        return self[int(self._lines[found[0]])]

    def column(self, name: str) -> np.ndarray:
        """[rows] of one column: numbers, str objects, or for what is kept of tokens arrays."""
        return self._columns([name], 0, len(self))[name]

    def stretches(self, names: Sequence[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Columns by name (all), some thousand rows at a time."""
        names = self.columns if names is None else names
        for start in range(0, len(self), _STRETCH):
            yield self._columns(names, start, min(start + _STRETCH, len(self)))

    def errors(self) -> list[dict[str, Any]]:
        """Rows that could not be used, by line: `line`, `id`, `reason`."""
        with self._reading():
            group, strings = self._file["errors"], {"errors": "replace"}
            columns = {
                n: group[n].asstr(**strings)[:] if kind is STRING else group[n][:] for n, kind in ERROR_COLUMNS.items()
            }
        order = np.argsort(columns["line"], kind="stable")
        return [{name: values[i] for name, values in columns.items()} for i in order]

    def pandas(self):
        """A pandas DataFrame of all rows; pandas must be installed."""
        import pandas

        return pandas.DataFrame({name: self.column(name) for name in self.columns})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _base(self, name: str) -> int:
        """Where the offsets of a column begin: not at 0 in a segment."""
        return int(self._ends[OFFSETS[name]][0])

    def _columns(self, names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        index = self._order[start:stop]
        with self._reading():
            return {name: self._entries(name, index) if name in OFFSETS else self._take(name, index) for name in names}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What HDF5 finds wrong is a UserError, as is a segment that went: HDF5 shows zeros in its place."""
        with reading(self._path):
            yield
        gone = [source for source in self.sources if not source.exists()]
        if gone:
            raise UserError(f"{self._path}: {gone[0]} has gone, as the job went on; open the results again")

    def _take(self, name: str, index: np.ndarray) -> np.ndarray:
        strings, dataset = COLUMNS[name].dtype is STRING, self._rows[name]
        values = _pick(dataset.asstr(errors="replace") if strings else dataset, index)
        return _REASONS[values] if name == "finish_reason" else values

    def _entries(self, name: str, index: np.ndarray) -> np.ndarray:
        out = np.empty(len(index), dtype=object)
        if len(index) == 0:
            return out
        ends, first, last = self._ends[OFFSETS[name]], int(index.min()), int(index.max())
        if last - first >= 2 * len(index):  # scattered: one read a row
            for i, row in enumerate(index):
                a, b = ends_checked(ends[row : row + 2], self._path) - self._base(name)
                out[i] = _held(name, self._rows[name][a:b])
            return out
        ends = ends_checked(ends[first : last + 2], self._path) - self._base(name)
        entries = self._rows[name][ends[0] : ends[-1]]
        for i, row in enumerate(index - first):
            out[i] = _held(name, entries[ends[row] - ends[0] : ends[row + 1] - ends[0]])
        return out


def _held(name: str, values: np.ndarray) -> np.ndarray | None:
    """What a row has of its entries [tokens] or [tokens, k]; None where it has none."""
    column = COLUMNS[name]
    if column.fill is None:
        return values
    lacking = np.isnan(values) if np.isnan(column.fill) else values == column.fill
    if not column.wide:
        return None if lacking.all() else values
    width = int((~lacking).sum(axis=1).max(initial=0))
    return values[:, :width] if width else None


def rows_of(columns: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Columns of one length as one dict a row."""
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _pick(dataset: Any, index: np.ndarray) -> np.ndarray:
    """Elements of a dataset in any order; in one read where they lie side by side."""
    if len(index) == 0:
        return dataset[0:0]
    first, last = int(index.min()), int(index.max())
    if last - first < 2 * len(index):
        return dataset[first : last + 1][index - first]
    order = np.argsort(index)
    values = dataset[index[order]]
    out = np.empty_like(values)
    out[order] = values
    return out
