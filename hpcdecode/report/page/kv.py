"""The tokens in KV caches over time against their capacity: of all ranks, of each rank, and as estimated from rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcdecode.report.account import Account
from hpcdecode.report.page.charts import Chart, Style
from hpcdecode.report.page.flow import Flow
from hpcdecode.report.page.maps import grouped, rank_map
from hpcdecode.report.page.markup import Html, element, joined
from hpcdecode.report.page.scales import axis, short, time_axis, time_unit

_MOST_LINES = 2  # ranks that have a line each
_MOST_CELLS = 64  # rows of the map of ranks over time
_POINTS = 240  # of time
_LINES: tuple[Style, ...] = ("line1", "line2")


def kv_load(accounts: Sequence[Account], capacities: dict[int, int], limit: int | None) -> Html | None:
    """Return charts of the tokens in KV caches over time, or None if no rank has a history.

    Args:
        accounts: Accounts of the ranks of one job.
        capacities: Capacities by rank, in tokens.
        limit: Limit of the schedule on the load of all ranks; None if it has none.
    """
    held = [a for a in accounts if a.load]
    if not held:
        return None
    seconds = max(max(a.load[-1][0] for a in held), 1e-3)
    edges = np.linspace(0, seconds, _POINTS + 1)
    loads = np.stack([_sampled(a, edges[:-1]) for a in held])
    own = [capacities[a.rank] for a in held if a.rank in capacities]
    whole = sum(own) if len(own) == len(held) else None
    parts = [_total(edges, loads, whole, limit)]
    if len(held) > 1:
        parts.append(_each(held, edges, loads, own if whole else []))
    if len(held) > _MOST_LINES:
        parts.append(_map(held, edges, loads))
    return joined(parts)


def _sampled(account: Account, times: np.ndarray) -> np.ndarray:
    """Return the tokens in a rank's KV cache at times, [n]; a value holds until the next sample."""
    seconds, tokens = (np.array(values, np.float64) for values in zip(*account.load, strict=True))
    last = seconds[-1] + (seconds[-1] - seconds[0]) / len(seconds)
    places = np.searchsorted(seconds, times, "right")
    values: np.ndarray = np.where(times > last, 0, np.concatenate([[0.0], tokens])[places])
    return values


def _load_chart(
    title: str, said: str, clock: str, edges: np.ndarray, top: float, lines: Sequence[tuple[int | None, str]]
) -> Chart:
    """Return a chart of tokens over time with limits; those far above the load are named, not drawn.

    Args:
        title: Title of the chart.
        said: What is to be seen, in words.
        clock: What the time counts from.
        edges: Times in seconds.
        top: Largest load.
        lines: Limits with their names; None for one that is not known.
    """
    known = [(value, label) for value, label in lines if value]
    drawn = [(value, label) for value, label in known if value <= 4 * max(top, 1)]
    high = max([top, *(value * 1.08 for value, _ in drawn)])
    facts = [f"{label} {value:,.0f} tokens" + f" (peak load {top / value:.1%} of it)" for value, label in known]
    chart = Chart(
        title,
        " ".join([said, *(f"{fact[0].upper()}{fact[1:]}." for fact in facts)]),
        time_axis(float(edges[-1]), clock),
        axis("tokens in KV caches", max(high, 1)),
    )
    for value, label in drawn:
        chart.limit(value, f"{label} {short(value)}")
    chart.note("; ".join(fact for fact, line in zip(facts, known, strict=True) if line not in drawn))
    return chart


def _total(edges: np.ndarray, loads: np.ndarray, capacity: int | None, limit: int | None) -> Html:
    total = loads.sum(axis=0)
    ranks = f"{len(loads):,} ranks" if len(loads) > 1 else "the rank"
    lines = ((capacity, "capacity"), (limit, "load limit"))
    said = f"Tokens in the KV caches of {ranks} over time; the peak is {total.max():,.0f}."
    chart = _load_chart("KV load of the job", said, "the start of the ranks", edges, float(total.max()), lines)
    unit, _ = time_unit(float(edges[-1]))
    chart.steps(edges / unit, total, "line1", f"sum of {ranks}", fill=True)
    return joined([element("h3", "All ranks together"), chart.figure()])


def _each(held: Sequence[Account], edges: np.ndarray, loads: np.ndarray, capacities: Sequence[int]) -> Html:
    """Return a chart with a line a rank, or with the band of many."""
    low, median, high = np.quantile(loads, (0, 0.5, 1), axis=0)
    said = f"Tokens in the KV cache of a rank over time; the fullest of {len(held):,} ranks holds {high.max():,.0f}."
    alike = len(set(capacities)) == 1
    lines = ((min(capacities, default=None), "capacity of each rank" if alike else "capacity of the smallest"),)
    chart = _load_chart("KV load of each rank", said, "each rank's start", edges, float(high.max()), lines)
    unit, _ = time_unit(float(edges[-1]))
    times = edges / unit
    if len(held) <= _MOST_LINES:
        for account, values, css in zip(held, loads, _LINES, strict=False):
            chart.steps(times, values, css, f"rank {account.rank}")
    else:
        chart.band(times, low, high, "least to most of all ranks")
        chart.steps(times, median, "line1", "median")
    return joined([element("h3", "Rank by rank"), chart.figure()])


def _map(held: Sequence[Account], edges: np.ndarray, loads: np.ndarray) -> Html:
    """Return a map of ranks over time, stronger in colour where a KV cache holds more."""
    borders, groups = grouped(len(held), _MOST_CELLS)
    means = np.stack([loads[start:stop].mean(axis=0) for start, stop in groups])
    means = means.reshape(len(groups), _POINTS // 2, 2).mean(axis=2)
    each = f"the mean of up to {groups[0][1]:,} ranks" if groups[0][1] > 1 else "a rank"
    return rank_map(
        "Timeline of the ranks: tokens in their KV caches",
        f"Each line is {each}; the stronger the colour, the fuller its KV cache.",
        time_axis(float(edges[-1]), "each rank's start"),
        borders,
        [account.rank for account in held],
        means,
        "tokens",
    )


def kv_estimate(flow: Flow, capacity: int | None) -> Html:
    """Return a chart of the tokens of rows in flight, from the rows that are done alone."""
    top = float(flow.held.max())
    said = f"Tokens of prompts and texts of the rows in flight over time; the peak is {top:,.0f}."
    lines = ((capacity, "capacity"),)
    chart = _load_chart("KV load, from the rows", said, "the first prefill", flow.edges, top, lines)
    unit, _ = time_unit(float(flow.edges[-1]))
    chart.steps(flow.edges / unit, flow.held, "line1", "rows in flight", fill=True)
    return chart.figure("From the times and lengths of the rows that are done; rows in flight are not in it.")
