"""Charts as SVG: axes with titles, steps, bands, bars and limits, and a legend that tells lines by their form too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hpcdecode.report.page.markup import Html, element, scrolled
from hpcdecode.report.page.scales import Axis

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 26, 46

Style = Literal["line1", "line2", "line3", "limit", "mean", "band", "bar1", "bar2", "bar3", "bar4", "whisker"]


Values = Sequence[float] | np.ndarray


class Chart:
    """A picture with two axes, to which marks are added one over the other.

    Args:
        title: What it shows, another one than other charts of the page; a screen reader says it first.
        description: What is to be seen in it, in words.
        x: Axis to the right.
        y: Axis upward.
        width: Width in units of the picture, of which text has 12.5 in height.
        height: Height likewise.
    """

    def __init__(self, title: str, description: str, x: Axis, y: Axis, width: int = 960, height: int = 280) -> None:
        self._title, self._description = title, description
        self._x, self._y = x, y
        self._width, self._height = width, height
        self._marks: list[Html] = []
        self._legend: list[Html] = []

    def across(self, value: float) -> float:
        """Return where a value of the x axis lies."""
        return round(_LEFT + (self._width - _LEFT - _RIGHT) * self._x.place(value), 1)

    def up(self, value: float) -> float:
        """Return where a value of the y axis lies."""
        return round(_TOP + (self._height - _TOP - _BOTTOM) * (1 - self._y.place(value)), 1)

    def steps(self, edges: Values, values: Values, css: Style, name: str, *, fill: bool = False) -> None:
        """Draw values that hold from one edge to the next.

        Args:
            edges: Where each value begins, and the end of the last, [n + 1].
            values: The values, [n].
            css: Class of the line.
            name: Name in the legend.
            fill: Whether to fill the area below.
        """
        line = self._steps(edges, values)
        if fill:
            area = f"{line}V{self.up(self._y.low)}H{self.across(edges[0])}Z"
            self._marks.append(element("path", d=area, class_="fill1"))
        self._marks.append(element("path", d=line, class_=css))
        self._name(css, name)

    def band(self, edges: Values, low: Values, high: Values, name: str) -> None:
        """Fill what lies between two lines of steps; the arguments are those of `steps`."""
        back = self._steps(list(edges)[::-1], list(low)[::-1]).replace("M", "L")
        self._marks.append(element("path", d=f"{self._steps(edges, high)}{back}Z", class_="band"))
        self._name("band", name)

    def limit(self, value: float, name: str, css: Style = "limit") -> None:
        """Draw a line across at a value, with its name at the line."""
        y = self.up(value)
        ends = {"x1": _LEFT, "x2": self._width - _RIGHT, "y1": y, "y2": y}
        self._marks.append(element("line", class_=css, **ends))
        self._marks.append(self._text(name, self._width - _RIGHT, y - 5, "end", "mark"))

    def note(self, text: str) -> None:
        """Write a line at the upper right corner, if there is one to write."""
        if text:
            self._marks.append(self._text(text, self._width - _RIGHT, 13, "end", "mark"))

    def cells(self, edges: Values, borders: Values, marked: np.ndarray, darkness: float, name: str) -> None:
        """Fill some cells of a grid.

        Args:
            edges: Borders of its columns, [n + 1].
            borders: Borders of its lines, [m + 1].
            marked: Cells to fill, [m, n] bool.
            darkness: Opacity.
            name: Name in the legend.
        """
        path = []
        for low, high, line in zip(borders, borders[1:], marked, strict=False):
            ends = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(np.int8), [0]])))
            bottom, top = self.up(low), self.up(high)
            for start, stop in zip(ends[::2], ends[1::2], strict=True):
                left, right = self.across(edges[start]), self.across(edges[stop])
                path.append(f"M{left} {top}H{right}V{bottom}H{left}Z")
        self._marks.append(element("path", d="".join(path), class_="heat", fill_opacity=round(darkness, 2)))
        self._legend.append(element("li", swatch("heat", darkness), name))

    def columns(
        self, edges: Values, tops: Sequence[Sequence[float]], css: Sequence[Style], names: Sequence[str]
    ) -> None:
        """Draw columns of parts, one over the other.

        Args:
            edges: Where each column begins, and the end of the last, [n + 1].
            tops: Heights of the parts, [parts][n].
            css: Class of each part.
            names: Names in the legend; one that is empty is left out.
        """
        base = [self._y.low] * (len(edges) - 1)
        for heights, style, name in zip(tops, css, names, strict=True):
            ends = [below + height for below, height in zip(base, heights, strict=True)]
            path = [
                f"M{self.across(a)} {self.up(low)}V{self.up(high)}H{self.across(b)}V{self.up(low)}Z"
                for a, b, low, high in zip(edges, edges[1:], base, ends, strict=False)
                if high > low
            ]
            self._marks.append(element("path", d="".join(path), class_=f"part {style}"))
            base = ends
            if name:
                self._name(style, name)

    def figure(self, caption: str = "") -> Html:
        """Return the chart with its legend and a caption."""
        name = re.sub(r"\W+", "-", self._title.lower())
        title, description = f"{name}-title", f"{name}-description"
        svg = element(
            "svg",
            element("title", self._title, id=title),
            element("desc", self._description, id=description),
            *self._axes(),
            *self._marks,
            viewBox=f"0 0 {self._width} {self._height}",
            class_="chart",
            role="img",
            aria_labelledby=title,
            aria_describedby=description,
        )
        legend = element("ul", *self._legend, class_="legend") if len(self._legend) > 1 else None
        return element(
            "figure", legend, scrolled(svg, self._title), element("figcaption", caption) if caption else None
        )

    def _steps(self, edges: Values, values: Values) -> str:
        parts = [f"M{self.across(edges[0])} {self.up(values[0])}"]
        before = None
        for start, end, value in zip(edges, edges[1:], values, strict=False):
            height = self.up(value)
            if before is not None and height != before:
                parts.append(f"H{self.across(start)}V{height}")
            before = height
            last = end
        return "".join([*parts, f"H{self.across(last)}"])

    def _axes(self) -> list[Html]:
        """Return the lines, numbers and titles of both axes."""
        right, bottom = self._width - _RIGHT, self._height - _BOTTOM
        marks = []
        marks.append(element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="base"))
        for tick, label in self._y.labels():
            y = self.up(tick)
            if tick > self._y.low and not self._y.names:
                marks.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
            marks.append(self._text(label, _LEFT - 8, y + 4, "end"))
        for tick, label in self._x.labels():
            x = self.across(tick)
            marks.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, class_="base"))
            marks.append(self._text(label, x, bottom + 19, "middle"))
        middle = (_LEFT + right) / 2
        marks.append(self._text(self._x.title, middle, self._height - 8, "middle", "title"))
        marks.append(self._text(self._y.title, 4, 13, "start", "title"))
        return marks

    def _text(self, text: str, x: float, y: float, anchor: str, css: str | None = None) -> Html:
        return element("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=css)

    def _name(self, css: Style, name: str) -> None:
        self._legend.append(element("li", swatch(css), name))


def swatch(css: str, opacity: float | None = None) -> Html:
    """Return a small sample of a line, a band or a bar."""
    if css.startswith("bar") or css in ("band", "heat"):
        mark = element("path", d="M0 0H26V12H0Z", class_=css, fill_opacity=opacity)
    else:
        mark = element("path", d="M0 6H26", class_=css)
    return element("svg", mark, viewBox="0 0 26 12", aria_hidden="true")


def share_bars(rows: Sequence[tuple[str, int]], caption: str, column: str) -> Html:
    """Return a table of names with counts, and their shares as numbers and bars."""
    whole = max(sum(number for _, number in rows), 1)
    header = [element("th", name, scope="col", class_=css) for name, css in _share_header(column)]
    lines = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", f"{number:,}", class_="number"),
            element("td", f"{number / whole:.1%}", class_="number"),
            element("td", _bar(number / whole), aria_hidden="true"),
        )
        for name, number in rows
    ]
    head = element("thead", element("tr", *header, element("td", aria_hidden="true")))
    parts = (element("caption", caption, class_="unseen"), head, element("tbody", *lines))
    return scrolled(element("table", *parts), caption)


def _share_header(column: str) -> tuple[tuple[str, str | None], ...]:
    return ((column, None), ("rows", "number"), ("share", "number"))


def _bar(share: float) -> Html:
    return element("span", element("span", style=f"width:{share:.2%}"), class_="share")
