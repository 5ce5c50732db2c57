"""Rows read ahead by a thread: order, bounds, errors, and an end in every case."""

from __future__ import annotations

import threading
import time

import pytest

from hpcdecode.data.prompts import feed as module
from hpcdecode.data.prompts.feed import RowFeed
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt


class Errors(list):
    error = list.append


def prompt(line, tokens=3):
    return Prompt(line, str(line), [1] * tokens, SamplingParams())


def test_rows_come_in_order_and_errors_go_aside():
    rows = [prompt(1), RowError(2, "2", "bad"), prompt(3), RowError(4, "4", "bad")]
    errors = Errors()
    feed = RowFeed(iter(rows), errors)
    assert [p.line for p in feed.preview(5)[0]] == [1, 3]
    assert [feed.pop().line, feed.pop().line] == [1, 3]
    assert feed.peek() is None and feed.peek() is None
    assert [e.line for e in errors] == [2, 4]


def test_preview_tells_whether_there_is_more():
    feed = RowFeed(iter([prompt(i) for i in range(1, 6)]), Errors())
    assert [(len(rows), whole) for rows, whole in (feed.preview(4), feed.preview(5), feed.preview(9))] == [
        (4, False),
        (5, True),
        (5, True),
    ]


@pytest.mark.parametrize("tokens", [1, 1 << 16])
def test_reading_ahead_is_bounded(tokens):
    made, row = [], prompt(1, tokens)

    def endless():
        while True:
            made.append(None)
            yield row

    feed = RowFeed(endless(), Errors())
    feed.pop()
    time.sleep(0.3)
    most = 2 * min(module._AHEAD_ROWS, module._AHEAD_TOKENS // tokens) + 2
    assert len(made) <= most
    feed.close()
    assert not any(t.name == "row-reader" and t.is_alive() for t in threading.enumerate())


def test_what_reading_raises_is_raised_where_rows_are_asked_for():
    def broken():
        yield prompt(1)
        raise UserError("the disk is gone")

    feed = RowFeed(broken(), Errors())
    assert feed.pop().line == 1
    with pytest.raises(UserError, match="disk"):
        feed.peek()
