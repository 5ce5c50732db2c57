"""Traces: the timelines of all ranks as one file of Chrome trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.ranks.team import Team
from hpcdecode.report.account import Account
from hpcdecode.system.durable import destination, replacing
from hpcdecode.system.timeline import OPERATIONS, Spans, Timeline

_TAG = 5


class Record(msgspec.Struct):
    """Trace of one rank.

    Attributes:
        account: Time account.
        spans: Operations and KV load over time.
        began: Begin of the timeline on the rank's own clock, nanoseconds.
        offset: Nanoseconds to add to that clock to get that of rank 0.
    """

    account: Account
    spans: Spans
    began: int
    offset: int


def check_path(path: str, others: Sequence[str] = ()) -> None:
    """Check that a trace can be written.

    Args:
        path: File for the trace.
        others: Files of the job, which a trace must not replace.

    Raises:
        UserError: If it cannot.
    """
    target = destination(path, "--trace ", "choose another file")
    if str(target) in map(os.path.realpath, others):
        raise UserError(f"--trace {path}: expected a file of its own, got one of the job's; choose another file")
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"--trace {path}: expected a file in a folder that can be written to")


def clock_offset(team: Team) -> int:
    """Return the nanoseconds to add to this rank's clock to get that of rank 0. Collective over the team."""
    if team.comm is None:
        return 0
    from hpcdecode.mpi import message

    return message.clock_offset(team.comm)


def write_trace(path: str, team: Team, timeline: Timeline, offset: int) -> None:
    """Collect the timelines of all ranks on the lead, which writes them. Collective over the team.

    Args:
        path: File for the trace.
        team: The ranks.
        timeline: Timeline of this rank.
        offset: This rank's `clock_offset`.

    Raises:
        UserError: On the lead, if the file cannot be written.
    """
    timeline.enter("other")
    own = Record(Account.of(team.me, timeline), timeline.spans(), timeline.began, offset)
    records = _gathered(team, own)
    if records:
        try:
            with replacing(destination(path, "--trace ", "choose another file")) as file:
                file.writelines(line.encode() for line in _lines(records))
        except OSError as error:
            raise UserError(f"--trace {path}: writing failed: {error.strerror}; the results are complete") from None


def _gathered(team: Team, own: Record) -> list[Record]:
    """Return the records of all ranks on the lead, one rank after the other because they are large; elsewhere none."""
    if team.comm is None:
        return [own]
    from hpcdecode.mpi.message import receive, send

    if team.lead:
        ranks = range(team.comm.size)
        return [own if r == team.place else receive(team.comm, r, _TAG, Record) for r in ranks]
    send(team.comm, team.s_ranks[0], _TAG, own)
    return []


def _lines(records: list[Record]) -> Iterator[str]:
    """Yield the parts of a JSON object, one event a line, with times in microseconds since the first rank began."""
    zero = min(r.began + r.offset for r in records)
    summary = {"accounts": msgspec.to_builtins([r.account for r in records])}
    yield f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(summary)},\n"traceEvents": [\n'
    separator = ""
    for record in records:
        for event in _events(record, record.offset - zero):
            yield f"{separator}{event}"
            separator = ",\n"
    yield "\n]}\n"


def _events(record: Record, shift: int) -> Iterator[str]:
    account, spans = record.account, record.spans
    rank, lanes = account.rank, array("h", spans.lanes)
    name = f"rank {rank} {account.role} {account.host}"
    yield json.dumps({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
    for lane in sorted(set(lanes)):
        own = {"name": f"lane {lane}" if lane >= 0 else "no lane"}
        yield json.dumps({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane + 1, "args": own})
    names = list(OPERATIONS)
    for code, lane, (start, end) in zip(
        array("b", spans.codes), lanes, pairwise(array("q", spans.starts)), strict=False
    ):
        where = f'"pid": {rank}, "tid": {lane + 1}'
        time = f'"ts": {(start + shift) / 1e3:.3f}, "dur": {(end - start) / 1e3:.3f}'
        yield f'{{"ph": "X", "name": "{names[code]}", {where}, {time}}}'
    for tokens, start in zip(array("q", spans.loads), array("q", spans.load_starts), strict=True):
        time = f'"ts": {(start + shift) / 1e3:.3f}'
        yield f'{{"ph": "C", "name": "KV tokens", "pid": {rank}, {time}, "args": {{"tokens": {tokens}}}}}'
