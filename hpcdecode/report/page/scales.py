"""Axes of charts: round ticks, numbers as text, and units of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_TIMES = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"))
_SHORT = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k"))


class Axis(NamedTuple):
    """An axis of a chart.

    Attributes:
        title: What it shows, with the unit.
        low: Value at its begin.
        high: Value at its end.
        ticks: Values with a mark, ascending.
        names: Text of the marks; none for their values.
    """

    title: str
    low: float
    high: float
    ticks: list[float]
    names: Sequence[str] = ()

    def labels(self) -> list[tuple[float, str]]:
        """Return the marks with their text."""
        return list(zip(self.ticks, self.names or shorts(self.ticks), strict=True))

    def place(self, value: float) -> float:
        """Return where a value lies, 0 at the begin and 1 at the end of the axis, within 0 and 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def axis(title: str, high: float, count: int = 5, *, low: float = 0.0, tight: bool = False) -> Axis:
    """Return an axis with about `count` ticks at round values.

    Args:
        title: What it shows, with the unit.
        high: Largest value that it must show.
        count: Number of ticks wanted.
        low: Least value.
        tight: Whether it ends at `high` rather than at a tick.
    """
    span = max(high - low, 1e-9)
    step = _round_step(span / count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return Axis(title, low, low + span if tight else max(ticks[-1], low + step), ticks)


def _round_step(least: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= least * (1 - 1e-9))


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds of a unit that suits a span of time, and its name."""
    return next(((size, name) for least, size, name in _TIMES if seconds >= least), (1.0, "seconds"))


def time_axis(seconds: float, since: str) -> Axis:
    """Return the axis of a span of time, in the unit that suits it, from a moment that `since` names."""
    unit, name = time_unit(seconds)
    return axis(f"{name} since {since}", seconds / unit, 8, tight=True)


def duration(seconds: float) -> str:
    """Return a time such as 4.2 s, 12 min 5 s or 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60} min"


def short(value: float) -> str:
    """Return a number as text, such as 2,500, 120k or 8.3M."""
    return shorts([value])[0]


def shorts(values: Sequence[float]) -> list[str]:
    """Return numbers as text in the unit that suits the largest of them."""
    most = max(map(abs, values), default=0.0)
    size, letter = next(((size, letter) for least, size, letter in _SHORT if most >= least), (1.0, ""))
    return [_short(value / size) + letter * (value != 0) for value in values]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 or value == round(value) else f"{value:,.4g}"
