"""How busy each rank was over time, from the file that `generate --trace` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from hpcdecode.report.account import GROUPS, Account
from hpcdecode.report.page.charts import Chart
from hpcdecode.report.page.maps import grouped, rank_map
from hpcdecode.report.page.markup import Html, element, joined
from hpcdecode.report.page.scales import axis, time_axis, time_unit

_BINS = 240  # of time; twice as long ones if the trace goes on
_FIRST_BIN = 1e-4  # seconds
_MOST_SECONDS = 1e9
_MOST_LINES = 64  # of the map
_BUSY = frozenset(GROUPS["busy"])


class _Event(msgspec.Struct):
    ph: str
    name: str
    pid: int = 0
    ts: float = 0.0
    dur: float = 0.0


class BusyTimes(NamedTuple):
    """Shares of time that ranks were busy.

    Attributes:
        edges: Begins of the intervals and the end of the last, seconds since the first rank began, [n + 1].
        shares: Shares by rank, [ranks, n].
    """

    edges: np.ndarray
    shares: np.ndarray


class _Bins:
    """Seconds of each rank in intervals of time, which grow twice as long whenever the trace goes beyond them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._seconds = [[0.0] * _BINS for _ in ranks]
        self._width, self._end = _FIRST_BIN, 0.0

    def add(self, event: _Event) -> None:
        """Add a span if the rank was busy in it."""
        start, end = event.ts * 1e-6, (event.ts + event.dur) * 1e-6
        if event.ph != "X" or event.pid not in self._places or not 0 <= start <= end < _MOST_SECONDS:
            return
        while end >= self._width * _BINS:
            self._grow()
        self._end = max(self._end, end)
        if event.name in _BUSY:
            self._spread(self._seconds[self._places[event.pid]], start, end)

    def _spread(self, bins: list[float], start: float, end: float) -> None:
        for place in range(int(start / self._width), int(end / self._width) + 1):
            bins[place] += min(end, (place + 1) * self._width) - max(start, place * self._width)

    def _grow(self) -> None:
        for bins in self._seconds:
            bins[:] = [a + b for a, b in zip(bins[::2], bins[1::2], strict=True)] + [0.0] * (_BINS // 2)
        self._width *= 2

    def times(self) -> BusyTimes | None:
        """Return the shares; None if there was no span."""
        number = int(self._end / self._width) + 1
        if self._end <= 0:
            return None
        shares = np.array(self._seconds)[:, :number] / self._width
        return BusyTimes(np.arange(number + 1) * self._width, shares.clip(0, 1))


def read_busy(path: str, ranks: Sequence[int]) -> BusyTimes | None:
    """Return how busy ranks were, or None if the file does not have an event a line, as traces of this program do."""
    bins, decoder = _Bins(ranks), msgspec.json.Decoder(_Event)
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b'{"ph": "X"'):
                try:
                    bins.add(decoder.decode(line.rstrip(b",\n")))
                except msgspec.DecodeError:
                    return None
    return bins.times()


def busy_charts(times: BusyTimes, accounts: Sequence[Account]) -> Html:
    """Return a map of the ranks over time, and a chart of the least, median and most by role."""
    seconds = float(times.edges[-1])
    borders, groups = grouped(len(accounts), _MOST_LINES)
    means = np.stack([times.shares[start:stop].mean(axis=0) for start, stop in groups])
    each = f"the mean of up to {groups[0][1]:,} ranks" if groups[0][1] > 1 else "a rank"
    said = f"Each line is {each}; the stronger the colour, the busier it was."
    ranks = [account.rank for account in accounts]
    clock = time_axis(seconds, "the first rank's start")
    title = "Timeline of the ranks: share of time busy"
    parts = [rank_map(title, said, clock, borders, ranks, 100 * means, "%", 100.0)]
    for role in dict.fromkeys(account.role for account in accounts):
        own = [place for place, account in enumerate(accounts) if account.role == role]
        parts.append(_of_role(role, times.edges, 100 * times.shares[own]))
    return joined(parts)


def _of_role(role: str, edges: np.ndarray, shares: np.ndarray) -> Html:
    """Return a chart of the ranks of a role: a line of one, the least, median and most of several."""
    seconds = float(edges[-1])
    low, median, high = np.quantile(shares, (0, 0.5, 1), axis=0)
    ranks = f"{len(shares):,} {role}-ranks" if len(shares) > 1 else f"the {role}-rank"
    chart = Chart(
        f"Busy share of {ranks}",
        f"Share of time that {ranks} computed or attended, over time; the median is {median.mean():.0f} % on average.",
        time_axis(seconds, "the first rank's start"),
        axis("share of time busy (%)", 100),
        height=220,
    )
    times = edges / time_unit(seconds)[0]
    if len(shares) > 1:
        chart.band(times, low, high, "least to most of all ranks")
    chart.steps(times, median, "line1", "median" if len(shares) > 1 else ranks)
    return joined([element("h3", f"Busy share of {ranks}"), chart.figure()])
