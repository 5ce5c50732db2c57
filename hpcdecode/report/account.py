"""Where a rank's time went: read from a trace or from results, as a table."""

from __future__ import annotations

from pathlib import Path

import h5py
import msgspec

from hpcdecode.data.results.checked import Unsound, open_results, read_attribute
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.report.text import table
from hpcdecode.system.timeline import OPERATIONS, Timeline

GROUPS = {  # of operations; what they are for a reader
    "busy": ("slice", "logits", "prefill", "sample", "append", "attend"),
    "overhead": ("plan", "post", "take", "commit", "desk"),
    "wait": ("wait",),
    "bubble": ("idle",),
}
_SAMPLES = 256  # of the KV load, in results


class Account(msgspec.Struct, frozen=True):
    """Of one rank. seconds: by operation, all of them; load: (seconds since its start, tokens in its KV cache)."""

    rank: int
    host: str
    role: str
    seconds: dict[str, float]
    load: list[tuple[float, int]]

    @staticmethod
    def of(rank: Rank, timeline: Timeline) -> Account:
        load = timeline.load
        every = -(-len(load.values) // _SAMPLES) or 1
        seconds = ((start - timeline.began) * 1e-9 for start in load.starts[::every])
        samples = list(zip(seconds, load.values[::every], strict=True))
        return Account(rank.rank, rank.host, rank.role, timeline.shares(), samples)

    @property
    def work(self) -> float:
        """Seconds of the work on rows: without its start and its end."""
        return sum(self.seconds.get(o, 0.0) for group in GROUPS.values() for o in group)

    def share(self, group: str) -> float:
        """Of `work`, that of a group of operations."""
        return sum(self.seconds.get(o, 0.0) for o in GROUPS[group]) / max(self.work, 1e-9)


class _Summary(msgspec.Struct):
    accounts: list[Account] = []


class _TraceFile(msgspec.Struct):
    otherData: _Summary


def read(path: str) -> list[Account]:
    """The ranks' accounts from a trace or a results file; UserError if it is neither, or has none."""
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
    """Shares of the work by rank, then the seconds of single operations."""
    header = ("rank", "role", "host", "work", *GROUPS, "peak KV")
    shares = (
        (a.rank, a.role, a.host, f"{a.work:.2f} s", *(f"{a.share(g):.1%}" for g in GROUPS), _peak(a)) for a in accounts
    )
    used = [o for o in OPERATIONS if any(o in a.seconds for a in accounts)]
    seconds = ((a.rank, *(f"{a.seconds.get(o, 0.0):.3f}" for o in used)) for a in accounts)
    return f"{table(header, shares)}\n\nseconds:\n{table(('rank', *used), seconds)}"


def _peak(account: Account) -> str:
    return f"{max(tokens for _, tokens in account.load):,} tokens" if account.load else "-"
