"""What one run of an engine owns on this rank."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.rotating import RotatingKvCache
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.desk import RankReport
from hpcdecode.engine.group_lane import MpiGroupLane
from hpcdecode.engine.member import Member
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.base import SLink
from hpcdecode.report.account import Account
from hpcdecode.report.metrics import Metrics

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.mpi import MpiRLink


@dataclass
class Work:
    """The lanes of a run, and what plays this rank's roles.

    Attributes:
        links: this rank's ends of the lanes.
        groups: the lanes of its group; none if it has one member.
        s_rank: None on ranks without weights, and until it is made.
        member: that runs in its place on S-ranks that are no home of a group.
        attention: None on ranks without a KV cache.
        home_comms: that of the groups' homes; none on other ranks, and if there is one group.
    """

    attention: AttentionWorker | None = None
    s_rank: SRank | None = None
    member: Member | None = None
    links: Sequence[SLink | MpiRLink] = ()
    groups: Sequence[MpiGroupLane] = ()
    home_comms: Sequence[MPI.Intracomm] = ()

    def metrics(self, account: Account) -> Metrics:
        """Return what this rank counted."""
        metrics = Metrics(account=account, peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
        if (s_rank := self.s_rank) is not None:
            metrics.s_role = True
            metrics.s_seconds, metrics.steps = s_rank.seconds, s_rank.steps
            metrics.peak_prefill_tokens, metrics.peak_load = s_rank.peak_prefill_tokens, s_rank.peak_load
            metrics.prefill_seconds, metrics.decode_seconds = s_rank.prefill_seconds, s_rank.decode_seconds
            for scheduler in s_rank.schedulers:
                metrics.preemptions += scheduler.preemptions
                metrics.preempted_tokens += scheduler.preempted_tokens
                metrics.shared_tokens += scheduler.shared_tokens
            speculation = s_rank.schedulers[0].speculation
            metrics.drafted_tokens, metrics.confirmed_tokens = speculation.drafted, speculation.confirmed
            if swaps := s_rank.schedulers[0].tiers.swaps:
                metrics.swapped, metrics.swapped_tokens = swaps.moved, swaps.moved_tokens
                metrics.swap_failures = swaps.failures
            metrics.decode_tokens = s_rank.decode_tokens
        if (member := self.member) is not None:
            metrics.s_role = True
            metrics.s_seconds, metrics.steps = member.seconds, member.steps
            metrics.peak_prefill_tokens = member.peak_prefill_tokens
        for group in self.groups:
            if group.sums is not None:
                metrics.sum_bytes += group.sums.sent_bytes
                metrics.whole_sum_bytes += group.sums.whole_bytes
                metrics.expert_choices += int(group.choices[group.sums.member])
        if self.attention is not None:
            kv_cache = self.attention.kv_cache
            metrics.r_role = True
            metrics.peak_tokens, metrics.kv_left = self.attention.peak_tokens, kv_cache.used_tokens
            metrics.bytes_read, metrics.attend_seconds = kv_cache.bytes_read, kv_cache.attend_seconds
            if swap := self.attention.swap:
                metrics.swap_out_bytes, metrics.swap_in_bytes = swap.counts.bytes_out, swap.counts.bytes_in
                metrics.swap_seconds = swap.counts.seconds
            on_device = kv_cache.kv_cache if isinstance(kv_cache, HostKvCache) else kv_cache
            if isinstance(on_device, RotatingKvCache):
                counts = on_device.pages.counts
                metrics.swap_out_bytes, metrics.swap_in_bytes = counts.bytes_out, counts.bytes_in
                metrics.swap_seconds, metrics.swap_wait_seconds = counts.seconds, counts.waited
        return metrics

    def close(self) -> None:
        """Complete what is under way after the stop plans, and free the lanes' communicators; every rank calls this.

        That of homes stays: messages that nobody takes any more would come to the next one with its context.
        """
        for lane in (*self.links, *self.groups):
            lane.close()

    def report(self) -> RankReport:
        """Return what this rank knows of the requests that it works on."""
        s_rank = self.s_rank
        return s_rank.sink.last_report(s_rank.unfinished()) if s_rank else RankReport(None, [], [], [])
