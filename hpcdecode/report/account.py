"""Time accounts of the ranks: made from timelines, read from traces or results, shown as tables."""

from __future__ import annotations

from pathlib import Path

import h5py
import msgspec

from hpcdecode.data.results.checked import open_results, read_attribute
from hpcdecode.data.results.structure import Unsound
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.report.text import table
from hpcdecode.system.timeline import OPERATIONS, Timeline

GROUPS = {  # of operations, as reports show them
    "busy": ("slice", "logits", "prefill", "sample", "draft", "append", "attend"),
    "overhead": ("plan", "post", "sum", "take", "commit", "desk"),
    "wait": ("wait",),
    "bubble": ("idle",),
}
_SAMPLES = 256  # most samples of the KV load in results


class Account(msgspec.Struct, frozen=True):
    """Time account of one rank.

    Attributes:
        rank: Rank in the world at its start.
        host: Host name.
        role: `S`, `R` or `SR`.
        seconds: Seconds of every operation that took any.
        load: Samples of (seconds since the rank's start, tokens in its KV cache).
    """

    rank: int
    host: str
    role: str
    seconds: dict[str, float]
    load: list[tuple[float, int]]

    @staticmethod
    def of(rank: Rank, timeline: Timeline) -> Account:
        """Return the account of `rank` from its timeline."""
        load = timeline.load
        every = -(-len(load.values) // _SAMPLES) or 1
        seconds = ((start - timeline.began) * 1e-9 for start in load.starts[::every])
        samples = list(zip(seconds, load.values[::every], strict=True))
        return Account(rank.rank, rank.host, rank.role, timeline.shares(), samples)

    @property
    def work(self) -> float:
        """Return the seconds of the work on rows, without start and end."""
        return sum(self.seconds.get(o, 0.0) for group in GROUPS.values() for o in group)

    def share(self, group: str) -> float:
        """Return the share of a group of operations in `work`."""
        return sum(self.seconds.get(o, 0.0) for o in GROUPS[group]) / max(self.work, 1e-9)


class _Summary(msgspec.Struct):
    accounts: list[Account] = []


class _TraceFile(msgspec.Struct):
    otherData: _Summary


def read(path: str) -> list[Account]:
    """Return the ranks' accounts from a trace or a results file.

    Raises:
        UserError: If the file is neither, or has no accounts yet.
    """
    try:
        if not Path(path).is_file():
            raise UserError(f"{path}: expected results, or a file that --trace wrote, found none")
        if h5py.is_hdf5(path):
            file, _ = open_results(path)
            with file:
                found = msgspec.convert(read_attribute(file, "summary"), type=_Summary)
        else:
            found = msgspec.json.decode(Path(path).read_bytes(), type=_TraceFile).otherData
    except (OSError, KeyError, msgspec.DecodeError, Unsound, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: expected a trace of hpcdecode generate --trace, or its results: {error}") from None
    if not found.accounts:
        raise UserError(f"{path}: expected the results of a job that has ended; this one has no summary yet")
    return found.accounts


def text(accounts: list[Account]) -> str:
    """Return two tables: every rank's shares of the work, and the seconds of its operations."""
    header = ("rank", "role", "host", "work", *GROUPS, "peak KV")
    shares = (
        (a.rank, a.role, a.host, f"{a.work:.2f} s", *(f"{a.share(g):.1%}" for g in GROUPS), _peak(a)) for a in accounts
    )
    used = [o for o in OPERATIONS if any(o in a.seconds for a in accounts)]
    seconds = ((a.rank, *(f"{a.seconds.get(o, 0.0):.3f}" for o in used)) for a in accounts)
    return f"{table(header, shares)}\n\nseconds:\n{table(('rank', *used), seconds)}"


def _peak(account: Account) -> str:
    return f"{max(tokens for _, tokens in account.load):,} tokens" if account.load else "-"
