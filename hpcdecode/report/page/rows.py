"""Sections on rows: throughput over time, finish reasons, lengths, errors by cause, and texts of some rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdecode.data.results.layout import COLUMNS
from hpcdecode.report.page.charts import Chart, Style, share_bars
from hpcdecode.report.page.facts import Cause, LengthCounts, RunFacts
from hpcdecode.report.page.flow import Flow
from hpcdecode.report.page.markup import Html, cut, element, joined, table
from hpcdecode.report.page.scales import axis, short, time_axis, time_unit

_MOST_CAUSES = 20  # shown
_REASON, _TEXT, _PROMPT, _VALUE = 400, 3000, 1500, 200  # characters that are shown
_MOST_VALUES = 12  # input columns of a row that are shown
_OWN = frozenset(COLUMNS) | {"prompt"}


def throughput(flow: Flow) -> Html:
    """Return charts of the tokens a second over time: generated ones, and those of prompts."""
    spread = "The tokens of a row are spread evenly from its first to its last"
    generated = _rate("Tokens generated", flow, flow.generated, "line1", f"{spread}.", 250)
    prompt = _rate("Prompt tokens prefilled", flow, flow.prompt, "line1", "Spread evenly over a row's prefill.", 180)
    return joined([generated, prompt])


def _rate(title: str, flow: Flow, rate: np.ndarray, css: Style, caption: str, height: int) -> Html:
    seconds = float(flow.edges[-1])
    unit, _ = time_unit(seconds)
    mean = float(np.dot(rate, np.diff(flow.edges))) / seconds
    chart = Chart(
        title,
        f"Tokens a second over time: {mean:,.0f} on average, at most {rate.max():,.0f}.",
        time_axis(seconds, "the first prefill"),
        axis("tokens a second", max(float(rate.max()), 1.0), 5 if height > 200 else 3),
        height=height,
    )
    chart.steps(flow.edges / unit, rate, css, title, fill=True)
    chart.limit(mean, f"mean {short(mean if mean < 100 else round(mean))}", "mean")
    return joined([element("h3", title), chart.figure(caption)])


def finish_reasons(facts: RunFacts) -> Html:
    """Return a table of the reasons why rows ended, with errors."""
    rows = list(facts.reasons.items()) + ([("error", facts.errors)] if facts.errors else [])
    return share_bars(rows, "Rows by finish reason", "finish reason")


def lengths(title: str, what: LengthCounts, css: Style) -> Html:
    """Return a histogram of lengths."""
    beyond = [what.beyond] if what.beyond else []
    edges = what.edges + ([2 * what.edges[-1] - what.edges[-2]] if beyond else [])
    said = (
        f"shortest {what.least:,}, median {what.median:,.0f}, mean {what.mean:,.1f}, 95 % up to {what.high:,.0f}, "
        f"longest {what.most:,}"
    )
    chart = Chart(
        title,
        f"Histogram of {sum(what.counts) + what.beyond:,} rows: {said}.",
        axis("tokens", edges[-1], 5, tight=True),
        axis("rows", max([*what.counts, *beyond, 1]), 4),
        width=480,
        height=250,
    )
    chart.columns(edges, [[*what.counts, *(0 for _ in beyond)]], [css], [""])
    if beyond:
        chart.columns(edges, [[*(0 for _ in what.counts), *beyond]], ["bar4"], [""])
    far = f" The last column, in grey, has the {what.beyond:,} rows above {what.edges[-1]:,.0f}." if beyond else ""
    return joined([element("h3", title), chart.figure(f"{said[0].upper()}{said[1:]}.{far}")])


def errors(causes: list[Cause], number: int) -> Html:
    """Return a table of the errors by cause."""
    rows = []
    for cause in causes[:_MOST_CAUSES]:
        more = ", \u2026" if cause.number > len(cause.lines) else ""
        lines = ", ".join(str(line) for line in cause.lines) + more
        rows.append((cut(cause.reason, _REASON), f"{cause.number:,}", f"{cause.number / number:.1%}", lines))
    found = table(
        ("cause, as the first row has it", "rows", "share", "lines"), rows, "Errors by cause", (1, 2), long=True
    )
    left = causes[_MOST_CAUSES:]
    rest = f"{len(left):,} more causes, of {sum(cause.number for cause in left):,} rows, are not shown."
    same = "Errors that differ in numbers and quoted values alone are one cause."
    return joined([element("p", same, class_="muted"), found, element("p", rest) if left else ""])


def texts(rows: list[dict[str, Any]]) -> Html:
    """Return prompts, texts and columns of some rows."""
    return joined(_row(row) for row in rows)


def _row(row: dict[str, Any]) -> Html:
    tokens = f"{row['prompt_tokens']:,} + {len(row['token_ids']):,} tokens, {row['finish_reason']}"
    head = element("h3", f"Line {row['line']}, id {cut(row['id'], _VALUE)} ", element("span", tokens))
    prompt = row.get("prompt")
    parts = [element("h4", "Prompt"), _pre(prompt, _PROMPT)] if isinstance(prompt, str) else []
    columns = [name for name, value in row.items() if name not in _OWN and value is not None]
    listed = "; ".join(f"{cut(name, 60)}: {cut(row[name], _VALUE)}" for name in columns[:_MOST_VALUES])
    more = f"; {len(columns) - _MOST_VALUES:,} more" if len(columns) > _MOST_VALUES else ""
    said = [element("h4", "Input columns"), _pre(listed + more, _TEXT)] if columns else []
    return element("article", head, *parts, element("h4", "Text"), _pre(row["text"], _TEXT), *said)


def _pre(text: str, most: int) -> Html:
    return element("pre", cut(text, most), dir="auto") if text else element("pre", "(empty)", class_="muted")
