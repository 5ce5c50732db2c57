"""Maps of ranks over time, whose cells are stronger in colour the larger a value is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hpcdecode.report.page.charts import Chart
from hpcdecode.report.page.markup import Html, element, joined
from hpcdecode.report.page.scales import Axis, axis, shorts

_LEVELS = 5
_LINE = 18  # height of a line of few ranks
_MOST_NAMES = 16  # ranks that have their number each
_HEIGHT = 380  # of all lines, at most


def grouped(number: int, most: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Return the borders of at most `most` runs of neighbours, and begin and end of each run."""
    width = -(-number // most)
    groups = [(start, min(start + width, number)) for start in range(0, number, width)]
    return [*(float(start) for start, _ in groups), float(number)], groups


def rank_map(
    title: str,
    caption: str,
    time: Axis,
    borders: list[float],
    ranks: Sequence[int],
    values: np.ndarray,
    unit: str,
    top: float = 0.0,
) -> Html:
    """Return a map with a heading.

    Args:
        title: Title and heading.
        caption: What the cells are.
        time: Axis of the time.
        borders: Places of the lines of ranks, [lines + 1].
        ranks: Numbers of the ranks at these places.
        values: Values from 0, [lines, times].
        unit: Unit of the values.
        top: Value of the strongest colour; 0 for the largest value.
    """
    height = min(_LINE * len(values), _HEIGHT) + 72
    places = _places(borders, ranks)
    means = values.mean(axis=1)
    said = f"{caption} Means over time from {means.min():,.0f} to {means.max():,.0f} {unit}."
    top = _level_height(top or float(values.max()))
    chart = Chart(title, said, time, places, height=height)
    levels = np.ceil(values / top).astype(np.int64).clip(0, _LEVELS)
    edges = np.linspace(time.low, time.high, values.shape[1] + 1).tolist()
    for level in range(1, _LEVELS + 1):
        chart.cells(edges, borders, levels == level, level / _LEVELS, _level_name(level, top, unit))
    return joined([element("h3", title), chart.figure(caption)])


def _places(borders: list[float], ranks: Sequence[int]) -> Axis:
    """Return the axis of the ranks: with their numbers if they are few, else with a number every some ranks."""
    if len(ranks) <= _MOST_NAMES:
        middles = [(low + high) / 2 for low, high in pairwise(borders)]
        return Axis("rank", 0.0, borders[-1], middles, [str(rank) for rank in ranks])
    plain = axis("rank", borders[-1], 8, tight=True)
    ticks = [tick for tick in plain.ticks if tick < len(ranks)]
    return plain._replace(ticks=ticks, names=[f"{ranks[int(tick)]:,}" for tick in ticks])


def _level_height(most: float) -> float:
    """Return the height of a level, with two digits, such that all of them reach `most`."""
    least = max(most, 1e-9) / _LEVELS
    digit = 10.0 ** (math.floor(math.log10(least)) - 1)
    return math.ceil(least / digit - 1e-9) * digit


def _level_name(level: int, height: float, unit: str) -> str:
    low, high = shorts([(level - 1) * height, level * height, _LEVELS * height])[:2]
    return f"{low} to {high}{f' {unit}' if level == _LEVELS else ''}"
