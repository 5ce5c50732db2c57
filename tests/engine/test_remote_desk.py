"""Rows at an S-rank that is not the lead: those without a result are told at once, whatever else there is to do."""

from __future__ import annotations

from collections import deque

import pytest

from hpcdecode.engine import remote
from hpcdecode.engine.remote import RemoteDesk, Rows
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt


class Lead:
    """The lead as a communicator shows it: what it has sent, by tag, and the reports that it was sent."""

    def __init__(self):
        self.sent = {remote._ROWS: deque(), remote._CANCEL: deque()}
        self.reports = []

    def Iprobe(self, _source, tag):
        return bool(self.sent[tag])

    def give(self, *lines, last=False):
        prompts = [Prompt(line, str(line), [5], SamplingParams()) for line in lines]
        self.sent[remote._ROWS].append(Rows([prompts], last))

    def cancel(self, line):
        self.sent[remote._CANCEL].append(line)

    @property
    def errors(self):
        return [(error.line, error.reason) for report in self.reports for error in report.errors]


@pytest.fixture
def lead(monkeypatch):
    lead = Lead()
    monkeypatch.setattr(remote, "send", lambda _comm, _target, _tag, report: lead.reports.append(report))
    monkeypatch.setattr(remote, "receive", lambda comm, _source, tag, _kind: comm.sent[tag].popleft())
    return lead


def test_a_row_that_is_refused_is_told_while_the_next_ones_are_awaited(lead):
    desk = RemoteDesk(lead, None, [8], 0, live=True)
    lead.give(1)
    prompt = desk.peek()
    assert [bool(report.asks) for report in lead.reports] == [True, True]  # the second is not answered yet
    desk.refuse(prompt, "too long")
    assert lead.errors == [(1, "too long")]


def test_rows_that_wait_and_nobody_wants_do_not_run(lead):
    desk = RemoteDesk(lead, None, [1], 8, live=True)
    lead.give(1, 2, 3, 4)
    assert desk.peek().line == 1 and desk.pop().line == 1
    for line in (1, 2, 4, 5):  # of row 5 the lead has sent no word yet
        lead.cancel(line)
    assert list(desk.take_cancelled()) == [1, 2, 4, 5]
    assert desk.peek().line == 3 and desk.pop().line == 3
    lead.give(5, 6, last=True)
    assert desk.peek().line == 6 and desk.pop().line == 6
    assert desk.peek() is None and desk.exhausted()
    assert lead.errors == [(line, "cancelled") for line in (2, 4, 5)]
