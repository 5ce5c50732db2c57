"""The command `hpcdecode show OUT.h5 [ROW ...]`: prints rows of a results file as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from hpcdecode.data.results.read import Results
from hpcdecode.data.results.where import accepted, conditions_of
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable

_DEFAULT_ROWS = 5  # shown if no row is named
_RANGE = re.compile(r"(\d+)-(\d+)")

Row = dict[str, Any]


def show(path: str, wanted: Sequence[str] = (), where: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text to print: a summary, then rows and errors.

    Args:
        path: The results file.
        wanted: Rows to show: lines of the prompt file such as `7`, ranges of lines such as `1-5`, or ids; by default
            the first rows.
        where: Conditions that rows must meet, such as `label=yes`; rows that could not be used are then left out.

    Raises:
        UserError: The file is not a results file, a range is empty, or a condition cannot be used.
    """
    with Results(path) as results:
        state = "complete" if results.complete else "not complete"
        met = _met(results, where) if where else None
        errors = [] if where else results.errors()
        if met is not None:
            yield f"{path}: {len(met):,} of {len(results):,} rows meet {' and '.join(where)}, {state}"
            yield from _of_met(results, met, [_lines_or_id(text, results) for text in wanted], path, where)
            return
        yield f"{path}: {len(results)} rows, {len(errors)} errors, {state}"
        yield from _named(results, errors, wanted) if wanted else _first(results, errors, path)


Place = tuple[int, int]  # of a row: its line, and the number of the sample


def _met(results: Results, where: Sequence[str]) -> list[Place]:
    """Return the places of the rows that meet conditions, in their order."""
    batches = accepted(results, conditions_of(where, results), ("line", "sample"))
    return [place for batch in batches for place in zip(batch["line"].tolist(), batch["sample"].tolist(), strict=True)]


def _of_met(
    results: Results, met: list[Place], lines: list[tuple[int, int]], path: str, where: Sequence[str]
) -> Iterator[str]:
    """Yield the text of rows that meet conditions: of some lines, or the first ones and how many more there are."""
    if lines:
        met = [place for place in met if any(first <= place[0] <= last for first, last in lines)]
    shown = met if lines else met[:_DEFAULT_ROWS]
    for line, of_line in groupby(shown, key=lambda place: place[0]):
        samples = {sample for _, sample in of_line}
        yield from (_row(row) for row in results.samples(line) if row["sample"] in samples)
    if rest := met[len(shown) :]:
        conditions = "".join(f" --where {shlex.quote(text)}" for text in where)
        following = f"{rest[0][0]}-{rest[:_DEFAULT_ROWS][-1][0]}"
        yield f"\n--- {len(rest):,} more rows: hpcdecode show {path} {following}{conditions}"


def _lines_or_id(text: str, results: Results) -> tuple[int, int]:
    """Return the first and the last line that a text names, also as an id; (0, -1) if there is no such row."""
    first, last = _lines(text)
    if results.count(first, last) or (line := _line_of(text, results, [])) is None:
        return first, last
    return line, line


def _first(results: Results, errors: list[Row], path: str) -> Iterator[str]:
    """Yield the text of the first rows and errors, and how many more there are."""
    last = 0
    for row in islice(results, _DEFAULT_ROWS):
        yield _row(row)
        last = row["line"]
    for error in errors[:_DEFAULT_ROWS]:
        yield _error(error)
    more = [(len(results), "rows"), (len(errors), "errors")]
    told = [f"{count - _DEFAULT_ROWS:,} more {what}" for count, what in more if count > _DEFAULT_ROWS]
    if told:
        yield f"\n--- {' and '.join(told)}: hpcdecode show {path} {last + 1}-{last + _DEFAULT_ROWS}"


def _named(results: Results, errors: list[Row], wanted: Sequence[str]) -> Iterator[str]:
    """Yield the text of rows and errors by lines, ranges and ids, each once, and of those that do not exist."""
    lines: list[tuple[int, int]] = []
    missing = []
    for text in wanted:
        first, last = _lines(text)
        if results.count(first, last) or any(first <= e["line"] <= last for e in errors):
            lines.append((first, last))
        elif (line := _line_of(text, results, errors)) is not None:
            lines.append((line, line))
        else:
            missing.append(text)
    shown = 0
    for first, last in sorted(lines):
        for row in results.between(max(first, shown + 1), last):
            yield _row(row)
        shown = max(shown, last)
    for error in errors:
        if any(first <= error["line"] <= last for first, last in lines):
            yield _error(error)
    for text in missing:
        what = f"line {text}" if text.isdecimal() else f"lines {text}" if _RANGE.fullmatch(text) else f"id {text}"
        until = "" if results.complete else ", or not yet: the job is not complete"
        yield f"\n--- {printable(what)}: there is no such row{until}"


def _lines(text: str) -> tuple[int, int]:
    """Return the first and the last line that a text names; (0, -1) if it is an id.

    Raises:
        UserError: The range is empty.
    """
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise UserError(f"{text}: expected a range of lines such as 1-5, got one that ends before it begins")
        return first, last
    return (int(text), int(text)) if text.isdecimal() else (0, -1)


def _line_of(row_id: str, results: Results, errors: list[Row]) -> int | None:
    """Return the line of the row or error with an id, or None."""
    try:
        return int(results.by_id(row_id)["line"])
    except KeyError:
        return next((int(error["line"]) for error in errors if error["id"] == row_id), None)


def _row(row: Row) -> str:
    tokens = f"{row['prompt_tokens']} + {len(row['token_ids'])} tokens"
    sample = f", sample {row['sample']}" if row["sample"] else ""
    ending = row["finish_reason"] if "is_greedy" not in row else _scores(row)
    return f"\n--- line {row['line']}, id {row['id']}{sample}, {tokens}, {ending}\n{said(row)}"


def said(row: Row) -> str:
    """Return the text of a row, with what its parts are if it was parsed; its prompt, if that was scored."""
    if not (row.get("reasoning") or row.get("tool_calls")):
        return row["text"] or (row.get("prompt") or "" if "is_greedy" in row else "")
    parts = [f"reasoning: {row['reasoning']}"] if row["reasoning"] else []
    parts += [row["content"]] if row["content"] else []
    calls = (call["function"] for call in row["tool_calls"] or ())
    return "\n".join([*parts, *(f"call: {call['name']} {call['arguments']}" for call in calls)])


def _scores(row: Row) -> str:
    """Return what was found of a continuation or text that was scored."""
    notes = ["greedy"] * row["is_greedy"] + ["best"] * (row["is_best"] and row["prompt_tokens"] > 0)
    return ", ".join([f"logprob {row['cumulative_logprob']:.4f}, perplexity {row['perplexity']:.4g}", *notes])


def _error(error: Row) -> str:
    return f"\n--- line {error['line']}, id {error['id']}: error: {error['reason']}"
