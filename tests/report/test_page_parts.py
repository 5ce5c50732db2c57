"""What the page is made of: tokens over time, lengths, traces and colours."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from hpcdecode.errors import UserError
from hpcdecode.report.page.busy import read_busy
from hpcdecode.report.page.facts import lengths_of
from hpcdecode.report.page.flow import RowTimes, flow_of
from hpcdecode.report.page.style import STYLE
from hpcdecode.report.page.write import write_page
from tests.support.html_pages import HOSTILE, checked


def test_tokens_over_time_are_those_of_the_rows():
    random = np.random.default_rng(3)
    queued = 1.7e9 + random.uniform(0, 900, 4000)
    first = queued + random.uniform(0, 5, 4000)
    finished = first + np.where(random.random(4000) < 0.1, 0, random.uniform(0, 90, 4000))
    prompt, generated = (random.integers(1, 999, 4000).astype(np.float64) for _ in range(2))
    flow = flow_of(RowTimes(queued, first, finished, prompt, generated))
    width = flow.edges[1]
    assert np.isclose(flow.generated.sum() * width, generated.sum()) and np.isclose(
        flow.prompt.sum() * width, prompt.sum()
    )
    for place in (10, 100, 200):
        now = flow.edges[place + 1] + queued.min()
        share = ((now - first) / np.maximum(finished - first, 1e-9)).clip(0, 1)
        read = ((now - queued) / np.maximum(first - queued, 1e-9)).clip(0, 1)
        held = (prompt * read + generated * share)[finished > now].sum()
        assert np.isclose(flow.held[place], held, rtol=1e-6)


def test_lengths_count_every_row():
    values = np.concatenate([np.arange(500.0), [100_000.0]])
    found = lengths_of(values)
    assert sum(found.counts) + found.beyond == 501 and found.beyond == 1 and found.most == 100_000
    assert found.counts[0] == found.edges[1] and len(found.counts) <= 41
    whole = lengths_of(np.arange(41.0))
    assert whole.beyond == 0 and sum(whole.counts) == 41
    assert lengths_of(np.empty(0)) is None


def traced(path, spans, ranks=((0, "S"), (1, "R"), (2, "R"))):
    """Write a trace, an event a line, of spans (rank, operation, begin and end in seconds)."""
    accounts = [
        {"rank": rank, "host": HOSTILE, "role": role, "seconds": {"slice": 1.0}, "load": [[0.5, 7]] * (role == "R")}
        for rank, role in ranks
    ]
    events = [
        json.dumps({"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": start * 1e6, "dur": (end - start) * 1e6})
        for rank, name, start, end in spans
    ]
    head = f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps({"accounts": accounts})},\n"traceEvents": [\n'
    path.write_text(head + ",\n".join(events) + "\n]}\n")


def test_busy_times_of_a_trace(tmp_path):
    spans = [(0, "slice", 1.0, 3.0), (0, "wait", 3.0, 8.0), (1, "attend", 2.0, 2.5), (1, "idle", 2.5, 8.0)]
    spans += [(2, "attend", 7 + k / 10, 7 + k / 10 + 0.025) for k in range(10)] + [(9, "slice", 0.0, 8.0)]
    traced(tmp_path / "t.json", spans)
    times = read_busy(str(tmp_path / "t.json"), [0, 1, 2])
    width = times.edges[1]
    assert np.allclose(times.shares.sum(axis=1) * width, [2.0, 0.5, 0.25])
    assert 120 <= len(times.edges) - 1 <= 240 and 8.0 <= times.edges[-1] <= 8.0 + width
    inside = (times.edges[:-1] >= 1.0) & (times.edges[1:] <= 3.0)
    assert np.allclose(times.shares[0][inside], 1) and times.shares[0][times.edges[:-1] >= 3.0].max() == 0


@pytest.mark.parametrize("spans", [[], [(0, "slice", 0.0, 1.0)], [(0, "slice", -5.0, 1.0), (1, "attend", 0.0, 1e12)]])
def test_the_page_of_a_trace(tmp_path, spans):
    traced(tmp_path / "t.json", spans)
    write_page(str(tmp_path / "t.json"), str(tmp_path / "run.html"))
    read = checked((tmp_path / "run.html").read_text())
    assert "Where the time went" in read.text and "KV load over time" in read.text
    assert ("Busy share of 2 R-ranks" in read.text) == (spans == [(0, "slice", 0.0, 1.0)])


def test_what_is_neither_results_nor_trace_is_refused(tmp_path):
    (tmp_path / "t.json").write_text('{"otherData": 5}')
    for name in ("t.json", "none.h5"):
        with pytest.raises(UserError, match=name):
            write_page(str(tmp_path / name), str(tmp_path / "run.html"))
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_are_readable(theme):
    """Contrast as WCAG defines it: 4.5 for text, 3 for marks."""
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", STYLE.split("@media (prefers-color-scheme: dark)")[theme]))

    def luminance(name):
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(text, paper) >= 4.5 for text in ("ink", "muted", "bad") for paper in ("paper", "soft"))
    assert all(contrast(mark, "paper") >= 3 for mark in ("c1", "c2", "c3", "c4"))
