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
