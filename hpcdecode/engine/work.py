"""What one run of an engine owns on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.counters import metrics_of
from hpcdecode.engine.desk import RankReport
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.base import SLink
from hpcdecode.report.account import Account
from hpcdecode.report.metrics import Metrics

if TYPE_CHECKING:
    from hpcdecode.exchange.mpi import MpiRLink


@dataclass
class Work:
    """The lanes of a run, and what plays this rank's roles.

    Attributes:
        links: this rank's ends of the lanes.
        s_rank: None on ranks without weights, and until it is made.
        attention: None on ranks without a KV cache.
    """

    attention: AttentionWorker | None = None
    s_rank: SRank | None = None
    links: Sequence[SLink | MpiRLink] = ()

    def metrics(self, account: Account) -> Metrics:
        """Return what this rank counted."""
        return metrics_of(account, self.s_rank, self.attention)

    def report(self) -> RankReport:
        """Return what this rank knows of the requests that it works on."""
        s_rank = self.s_rank
        return s_rank.sink.last_report(s_rank.unfinished()) if s_rank else RankReport(-1, [], [], [])
