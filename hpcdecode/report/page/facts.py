"""What the page says of a results file, read with some 200 bytes of memory a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hpcdecode.data.results.read import Results
from hpcdecode.errors import UserError
from hpcdecode.report.account import Account
from hpcdecode.report.page.flow import Flow, RowTimes, flow_of

SAMPLES = 6  # rows whose texts are shown
_MOST_CAUSES = 4096  # that are told apart
_MOST_PARTS = 1024  # of merged results, whose summaries are read
_VARIES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d[\d,.]*\d|\d")  # what differs between alike errors
OTHER = "other causes"
ROLES = ("S", "SR", "R")
LARGEST = 1e15  # seconds and tokens of a rank that are believed


class LengthCounts(NamedTuple):
    """Lengths of prompts or of texts, in tokens.

    Attributes:
        counts: Rows by interval, [n].
        edges: Begins of the intervals and the end of the last, [n + 1].
        beyond: Rows that are longer than the last edge.
        least: Shortest.
        median: Median.
        mean: Mean.
        high: 95th percentile.
        most: Longest.
    """

    counts: list[int]
    edges: list[float]
    beyond: int
    least: int
    median: float
    mean: float
    high: float
    most: int


class Cause(NamedTuple):
    """Errors that are alike but for numbers and quoted values.

    Attributes:
        reason: Reason of the first one.
        number: Number of them.
        lines: First lines.
    """

    reason: str
    number: int
    lines: list[int]


class RunFacts(NamedTuple):
    """What a results file says of its job.

    Attributes:
        name: Name of the file.
        complete: Whether the job has ended with all its rows.
        attributes: Root attributes.
        summaries: Summaries of the job, or of the parts that were merged; none if it has not ended.
        accounts: Time accounts of the ranks of each summary.
        samples: Finished sequences.
        lines: Lines of the prompt files with results.
        errors: Rows that could not be used.
        causes: Errors by cause, most frequent first.
        reasons: Finished sequences by finish reason.
        prompt_tokens: Tokens of all prompts.
        generated_tokens: Generated tokens.
        prompts: Lengths of prompts; None without rows.
        texts: Lengths of texts; None without rows.
        flow: Tokens over time; None without rows.
        shown: Rows whose texts are shown.
    """

    name: str
    complete: bool
    attributes: dict[str, Any]
    summaries: list[dict[str, Any]]
    accounts: list[list[Account]]
    samples: int
    lines: int
    errors: int
    causes: list[Cause]
    reasons: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    prompts: LengthCounts | None
    texts: LengthCounts | None
    flow: Flow | None
    shown: list[dict[str, Any]]

    @property
    def merged(self) -> bool:
        """Whether the file was merged from several."""
        return "merged" in _object(self.attributes.get("summary"))


def read_facts(path: str) -> RunFacts:
    """Return the facts of a results file, of a job that is complete, running or interrupted.

    Raises:
        UserError: It is not a results file, or is damaged.
    """
    with Results(path) as results:
        times = RowTimes(
            results.column("queued_at"),
            results.column("first_token_at"),
            results.column("finished_at"),
            results.column("prompt_tokens").astype(np.float64).clip(0),
            results.token_counts().astype(np.float64),
        )
        lines = results.column("line")
        summaries = _summaries(_object(results.attributes.get("summary")))
        causes, errors = causes_of(results)
        return RunFacts(
            name=Path(path).name,
            complete=results.complete,
            attributes=results.attributes,
            summaries=summaries,
            accounts=[_accounts(summary, path) for summary in summaries],
            samples=len(results),
            lines=len(np.unique(lines)),
            errors=errors,
            causes=causes,
            reasons=dict(Counter(results.column("finish_reason").tolist()).most_common()),
            prompt_tokens=int(times.prompt.sum()),
            generated_tokens=int(times.generated.sum()),
            prompts=lengths_of(times.prompt),
            texts=lengths_of(times.generated),
            flow=flow_of(times),
            shown=_shown(results, lines),
        )


def lengths_of(values: np.ndarray, most: int = 40) -> LengthCounts | None:
    """Return the lengths of rows in at most `most` intervals. A long tail of few rows is counted as `beyond`."""
    if not len(values):
        return None
    median, high, tail = (float(v) for v in np.quantile(values, (0.5, 0.95, 0.99)))
    longest = int(values.max())
    end = longest if longest <= 4 * max(tail, 8) else int(2 * max(tail, 4))
    width = max(-(-(end + 1) // most), 1)
    edges = np.arange(0, end + width + 1, width, dtype=np.float64)
    inside = values[values < edges[-1]]
    counts = np.bincount((inside // width).astype(np.int64), minlength=len(edges) - 1)
    beyond = len(values) - len(inside)
    return LengthCounts(
        counts.tolist(), edges.tolist(), beyond, int(values.min()), median, float(values.mean()), high, longest
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _summaries(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the summaries of the parts of merged results, of parts of parts too, or the one summary there is."""
    found: list[dict[str, Any]] = []
    left = [summary]
    while left and len(found) < _MOST_PARTS:
        first = left.pop()
        parts = first.get("merged")
        if isinstance(parts, list):
            left += [_object(part) for part in reversed(parts[:_MOST_PARTS])]
        elif first:
            found.append(first)
    return found


def _accounts(summary: dict[str, Any], path: str) -> list[Account]:
    try:
        found = msgspec.convert(summary.get("accounts", []), type=list[Account])
    except (msgspec.ValidationError, OverflowError) as error:
        raise UserError(f"{path}: expected a summary that hpcdecode generate wrote: {error}") from None
    require_sound(found, path)
    return found


def require_sound(accounts: Sequence[Account], path: str) -> None:
    """Raise UserError unless roles are known, and all times and loads such that they can be added and drawn."""
    for account in accounts:
        if account.role not in ROLES:
            raise UserError(f"{path}: expected a role of {', '.join(ROLES)}, got {account.role[:40]!r}")
        numbers = [*account.seconds.values(), *(value for sample in account.load for value in sample)]
        if not all(0 <= number <= LARGEST for number in numbers):
            raise UserError(f"{path}: expected times and loads of rank {account.rank} from 0 to {LARGEST:.0e}")


def causes_of(results: Results) -> tuple[list[Cause], int]:
    """Return the errors by cause, most frequent first, and their number."""
    found: dict[str, Cause] = {}
    total = 0
    for lines, reasons in results.error_reasons():
        total += len(lines)
        for line, reason in zip(lines.tolist(), reasons, strict=True):
            key = _VARIES.sub("#", reason[:1000])
            key = key if key in found or len(found) < _MOST_CAUSES else OTHER
            cause = found.setdefault(key, Cause(OTHER if key == OTHER else reason[:1000], 0, []))
            found[key] = cause._replace(number=cause.number + 1, lines=_first_lines(cause.lines, line))
    return sorted(found.values(), key=lambda cause: (-cause.number, cause.lines)), total


def _first_lines(lines: list[int], line: int, most: int = 5) -> list[int]:
    if len(lines) == most and line >= lines[-1]:
        return lines
    return sorted([*lines, line])[:most]


def _shown(results: Results, lines: np.ndarray) -> list[dict[str, Any]]:
    """Return rows that lie evenly in the file, the first samples of their lines."""
    places: Sequence[int] = np.linspace(0, len(lines) - 1, min(SAMPLES, len(lines)), dtype=np.int64).tolist()
    return [results[line] for line in dict.fromkeys(int(lines[place]) for place in places)]
