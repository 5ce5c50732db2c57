"""Tokens of rows over time, from the times and lengths of the rows alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

INTERVALS = 240  # into which the time of a job is divided, at most
_SHORTEST = 0.01  # seconds of an interval
_MOST_SECONDS = 10 * 365.25 * 86400  # of a job; times that lie further apart are damaged


class Flow(NamedTuple):
    """What went on in intervals of equal length.

    Attributes:
        edges: Begins of the intervals and the end of the last, seconds since the first prefill, [n + 1].
        generated: Tokens generated a second, [n].
        prompt: Prompt tokens prefilled a second, [n].
        held: Tokens of prompts and texts of the rows in flight, [n] at the ends of the intervals.
    """

    edges: np.ndarray
    generated: np.ndarray
    prompt: np.ndarray
    held: np.ndarray


class RowTimes(NamedTuple):
    """Times of rows, seconds since 1970, and their lengths, float64 [n] each.

    Attributes:
        queued: Begin of prefill.
        first: First generated token.
        finished: Last generated token.
        prompt: Prompt tokens.
        generated: Generated tokens.
    """

    queued: np.ndarray
    first: np.ndarray
    finished: np.ndarray
    prompt: np.ndarray
    generated: np.ndarray


def flow_of(rows: RowTimes) -> Flow | None:
    """Return the flow of rows, or None if they have no times.

    The tokens of a prompt are spread evenly over its prefill, generated ones from the first to the last of the row.
    """
    rows = _with_times(rows)
    if not len(rows.queued):
        return None
    begin = float(rows.queued.min())
    seconds = max(float(rows.finished.max()) - begin, _SHORTEST)
    number = max(min(INTERVALS, int(seconds / _SHORTEST)), 1)
    width = seconds / number
    queued, first, finished = ((t - begin) / width for t in (rows.queued, rows.first, rows.finished))
    prefilled = _spread(queued, first, rows.prompt, number)
    generated = _spread(first, finished, rows.generated, number)
    gone = _spread(finished, finished, rows.prompt + rows.generated, number)
    edges = np.arange(number + 1) * width
    rates = [np.maximum(np.diff(total) / width, 0) for total in (generated, prefilled)]
    held = np.maximum(prefilled + generated - gone, 0)[1:]
    return Flow(edges, rates[0], rates[1], held)


def _with_times(rows: RowTimes) -> RowTimes:
    """Return the rows whose times are known and ascend; rows of damaged files may have any."""
    good = np.isfinite(rows.queued) & np.isfinite(rows.first) & np.isfinite(rows.finished)
    with np.errstate(invalid="ignore"):
        good &= (rows.queued > 0) & (rows.first >= rows.queued) & (rows.finished >= rows.first)
        good &= rows.finished - rows.queued < _MOST_SECONDS
    if good.any():
        good &= rows.finished - rows.queued[good].min() < _MOST_SECONDS
    return RowTimes(*(values[good] for values in rows))


def _spread(start: np.ndarray, end: np.ndarray, amount: np.ndarray, number: int) -> np.ndarray:
    """Return the amounts passed by each edge of `number` intervals, [number + 1], if each is spread evenly.

    With slopes s = amount / (end - start), it is the sum of s * (max(t - start, 0) - max(t - end, 0)) at time t.

    Args:
        start: Begins, in intervals, [n].
        end: Ends, likewise.
        amount: Amounts, [n].
        number: Number of intervals.
    """
    sudden = end - start < 1e-6
    slope = np.where(sudden, 0.0, amount / np.where(sudden, 1.0, end - start))
    edges = np.arange(number + 1)
    change, offset = np.zeros(number + 1), np.zeros(number + 1)
    for times, sign in ((start, 1.0), (end, -1.0)):
        place = np.ceil(times).astype(np.int64).clip(0, number)
        change += sign * np.bincount(place, slope, number + 1)
        offset += sign * np.bincount(place, slope * times, number + 1)
    passed = edges * np.cumsum(change) - np.cumsum(offset)
    at_once = np.bincount(np.ceil(end[sudden]).astype(np.int64).clip(0, number), amount[sudden], number + 1)
    whole: np.ndarray = passed + np.cumsum(at_once)
    return whole
