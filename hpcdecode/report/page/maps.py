"""Maps of ranks over time, whose cells are darker the larger a value is."""

from __future__ import annotations

import numpy as np

from hpcdecode.report.page.charts import Chart
from hpcdecode.report.page.markup import Html, element, joined
from hpcdecode.report.page.scales import Axis, axis

_LEVELS = 5
_LINE = 18  # height of a line of few ranks
_HEIGHT = 380  # of all lines, at most


def grouped(number: int, most: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Return the borders of at most `most` runs of neighbours, and begin and end of each run."""
    width = -(-number // most)
    groups = [(start, min(start + width, number)) for start in range(0, number, width)]
    return [*(float(start) for start, _ in groups), float(number)], groups


def rank_map(title: str, caption: str, time: Axis, borders: list[float], values: np.ndarray) -> Html:
    """Return a map with a heading.

    Args:
        title: Title and heading.
        caption: What the cells are.
        time: Axis of the time.
        borders: Places of the lines of ranks, [lines + 1].
        values: Values in 0 to 1, [lines, times].
    """
    height = min(_LINE * len(values), _HEIGHT) + 72
    places = axis("ranks in order", borders[-1], max(min(len(values), 8), 1), tight=True)
    said = f"{caption} Means over time from {values.mean(axis=1).min():.0%} to {values.mean(axis=1).max():.0%}."
    chart = Chart(title, said, time, places, height=height)
    levels = np.ceil(values * _LEVELS).astype(np.int64).clip(0, _LEVELS)
    edges = np.linspace(time.low, time.high, values.shape[1] + 1).tolist()
    for level in range(1, _LEVELS + 1):
        chart.cells(edges, borders, levels == level, level / _LEVELS)
    return joined([element("h3", title), chart.figure(caption)])
