"""The examination of a world, and its report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hpcdecode.doctor.checks import BINDING, CHECKS, Problem
from hpcdecode.doctor.exchange import ExchangeFacts, between_hosts
from hpcdecode.doctor.facts import Place, RankFacts, examine, place
from hpcdecode.ranks.launch import is_lead
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.report.text import table

if TYPE_CHECKING:
    from mpi4py import MPI


def doctor(comm: MPI.Intracomm | None, wishes: Wishes, as_json: bool) -> int:
    """Examine all ranks; rank 0 prints the report.

    Args:
        comm: The world; None for a single process.
        wishes: What is asked of the layout.
        as_json: Print a JSON object instead of text.

    Returns:
        The exit code: 1 on rank 0 if there are problems, else 0. Other ranks return 0, because a launcher that kills
        on a bad exit must not end rank 0 before it has printed.
    """
    team = assemble(comm, wishes, device=None)
    given = os.sched_getaffinity(0)
    team.pin()
    try:
        ranks = team.gather_all(examine(team.me, comm, given), RankFacts)
        exchange = between_hosts(comm, [facts.rank.host for facts in ranks])
    finally:
        os.sched_setaffinity(0, given)
    if team.me.rank != 0 or not is_lead():  # not the first process, in a world that fell apart
        return 0
    problems = [problem for check in CHECKS for problem in check(ranks)]
    print((_json if as_json else _text)(ranks, problems, exchange))
    return 1 if problems else 0


def binding(team: Team) -> list[str]:
    """Return lines about problems of how the launcher bound the ranks. Collective, before the ranks are pinned."""
    places = team.gather_all(place(team.me, os.sched_getaffinity(0)), Place)
    return _told(problem for check in BINDING for problem in check(places))


def _json(ranks: Sequence[RankFacts], problems: Sequence[Problem], exchange: ExchangeFacts | None) -> str:
    report = {"healthy": not problems, "problems": problems, "exchange": exchange, "ranks": ranks}
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def _text(ranks: Sequence[RankFacts], problems: Sequence[Problem], exchange: ExchangeFacts | None) -> str:
    first = ranks[0]
    beyond = [name for name in first.built_isas if name not in first.supported_isas]
    lines = [
        _table(ranks),
        "",
        f"MPI: {first.mpi}; started by {first.launcher or 'no launcher'}",
        f"ISAs built: {', '.join(first.built_isas)}"
        + (f"; beyond this machine: {', '.join(beyond)}" if beyond else "")
        + (f"; tested under an emulator only: {', '.join(first.untested_isas)}" if first.untested_isas else ""),
        f"attention on GPUs: {first.gpu_attention}",
        *([str(exchange)] if exchange else []),
        "versions: " + ", ".join(f"{name} {version}" for name, version in first.versions.items()),
        "",
    ]
    return "\n".join([*lines, *_told(problems), f"problems: {len(problems)}" if problems else "healthy"])


def _told(problems: Iterable[Problem]) -> list[str]:
    lines = []
    for p in problems:
        which = f"rank {p.ranks[0]}" if len(p.ranks) == 1 else f"ranks {', '.join(map(str, p.ranks))}"
        lines += [f"problem: {p.check}, {which}: {p.finding}", f"    remedy: {p.remedy}"]
    return lines


def _table(ranks: Sequence[RankFacts]) -> str:
    header = ("rank", "host", "role", "CPUs", "NUMA", "threads", "ISA", "huge pages", "local", "read GB/s", "free GiB")
    rows = []
    for f in ranks:
        r, m = f.rank, f.memory
        rates = " / ".join(f"{rate:g} ({n})" for n, rate in m.read_gbps.items()) if m else "-"
        rows.append(
            (
                r.rank,
                r.host,
                r.role,
                _ranges(f.cpus),
                f"{r.numa} of {f.host_nodes}",
                f"{r.threads}{'' if r.pinned else ' (unpinned)'}",
                r.isa or "-",
                f"{f.huge_pages or 'none'}{_share(m.huge) if m else ''}",
                _share(m.local).strip() or "-" if m else "-",
                rates,
                f"{f.available / 2**30:.1f}",
            )
        )
    return table(header, rows)


def _share(share: float) -> str:
    return f" {share:.0%}" if share >= 0 else ""


def _ranges(cpus: Sequence[int]) -> str:
    """Return CPUs as ranges: [0, 1, 2, 5] gives `0-2,5`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
