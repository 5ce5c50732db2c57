"""The shares of the ranks' time: a bar a rank; of many ranks a profile, and quantiles by role."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcdecode.report.account import GROUPS, Account
from hpcdecode.report.page.charts import Chart, Style, swatch
from hpcdecode.report.page.facts import ROLES
from hpcdecode.report.page.maps import grouped
from hpcdecode.report.page.markup import Html, element, joined, table
from hpcdecode.report.page.scales import axis, duration

_MOST_BARS = 16  # ranks that have a bar each
_MOST_COLUMNS = 128  # of the profile of many ranks
_STYLES: tuple[Style, ...] = ("bar1", "bar2", "bar3", "bar4")
_EXPLAINED = (
    "Busy: computing and attending. Overhead: planning, sending, taking results. Wait: S-ranks wait for attention "
    "output, R-ranks for queries. Bubble: an R-rank has no plan."
)


def shares(accounts: Sequence[Account]) -> Html:
    """Return the shares of each rank's time: a bar a rank, or a profile and quantiles of many."""
    if len(accounts) <= _MOST_BARS:
        return joined([_legend(), _bars(accounts), element("p", _EXPLAINED, class_="muted")])
    return joined([_profile(accounts), _ranges(accounts), element("p", _EXPLAINED, class_="muted")])


def _legend() -> Html:
    names = zip(_STYLES, GROUPS, strict=True)
    return element("ul", *(element("li", swatch(css), name) for css, name in names), class_="legend")


def _bars(accounts: Sequence[Account]) -> Html:
    header = ("rank", "role", "host", "work", *GROUPS, "shares of the work")
    rows = [
        (
            *(str(a.rank), a.role, a.host, duration(a.work), *(f"{a.share(g):.1%}" for g in GROUPS)),
            _stacked([a.share(g) for g in GROUPS]),
        )
        for a in accounts
    ]
    return table(header, rows, "Shares of each rank's work", numbers=range(3, 8))


def _profile(accounts: Sequence[Account]) -> Html:
    """Return a chart with a column a rank, or for the mean of neighbouring ranks; S-ranks first."""
    ordered = sorted(accounts, key=lambda a: ROLES.index(a.role))
    edges, groups = grouped(len(ordered), _MOST_COLUMNS)
    heights = [
        [100 * float(np.mean([a.share(group) for a in ordered[start:stop]])) for start, stop in groups]
        for group in GROUPS
    ]
    each = f"columns are means of up to {groups[0][1]} ranks" if groups[0][1] > 1 else "a column is a rank"
    runs = [f"{sum(a.role == role for a in ordered):,} of role {role}" for role in ROLES]
    runs = [run for run in runs if not run.startswith("0 ")]
    chart = Chart(
        "Shares of the ranks' work",
        f"Stacked columns for {len(ordered):,} ranks; {each}. The table below has minimum, median and maximum.",
        axis("ranks in order of role and number", len(ordered), 8, tight=True),
        axis("share of the work (%)", 100),
    )
    chart.columns(edges, heights, _STYLES, list(GROUPS))
    return chart.figure(f"From the left: {', '.join(runs)}; {each}.")


def _ranges(accounts: Sequence[Account]) -> Html:
    """Return a table of quantiles of the shares, by role and group of operations."""
    rows = []
    for role in dict.fromkeys(a.role for a in accounts):
        own = [a for a in accounts if a.role == role]
        for group in GROUPS:
            low, first, median, third, high = np.quantile([a.share(group) for a in own], (0, 0.25, 0.5, 0.75, 1))
            figures = (f"{value:.1%}" for value in (low, median, high))
            rows.append((f"{role} {group}", f"{len(own):,}", *figures, _range_picture(low, first, median, third, high)))
    header = ("role and share", "ranks", "minimum", "median", "maximum", "range, quartiles and median")
    return table(header, rows, "Quantiles of the shares of the work", numbers=range(1, 5))


def _range_picture(*quantiles: float) -> Html:
    low, first, median, third, high = (round(200 * min(max(float(q), 0.0), 1.0), 1) for q in quantiles)
    return element(
        "svg",
        element("path", d="M0 9H200", class_="base"),
        element("path", d=f"M{low} 9H{high}", class_="whisker"),
        element("path", d=f"M{first} 5H{third}V13H{first}Z", class_="bar1"),
        element("path", d=f"M{median} 2V16", class_="tick"),
        viewBox="-2 0 204 18",
        class_="range",
        aria_hidden="true",
    )


def _stacked(shares: Sequence[float]) -> Html:
    """Return a bar of parts; the numbers stand beside it."""
    parts = (
        element("span", style=f"width:{100 * min(max(share, 0.0), 1.0):.2f}%", class_=css)
        for share, css in zip(shares, _STYLES, strict=True)
    )
    return element("span", *parts, class_="stack", aria_hidden="true")
