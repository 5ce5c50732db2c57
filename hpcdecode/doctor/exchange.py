"""The exchange between hosts, timed both ways before a job does."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from hpcdecode.attention.shapes import LayerShape

if TYPE_CHECKING:
    from mpi4py import MPI

_SHAPE = LayerShape(4, 64, 64, 16, 1 / 8)  # of a hidden size of 1,024
_ROWS = 64  # of each R-rank
_ROUNDS = 20  # each way; half of them before the clock counts


class ExchangeFacts(msgspec.Struct, kw_only=True):
    """Times of a layer from rank 0 to one rank of every other host and back.

    Attributes:
        hosts: Number of the other hosts.
        messages_us: Microseconds by messages.
        collective_us: Microseconds by collectives.
        kept: What `--exchange auto` would keep, `messages` or `collective`.
    """

    hosts: int
    messages_us: float
    collective_us: float
    kept: str

    def __str__(self) -> str:
        times = f"messages {self.messages_us:.0f} us, collectives {self.collective_us:.0f} us a layer"
        hosts = f"{self.hosts} other host{'s' if self.hosts > 1 else ''}"
        rows = f"{_ROWS} rows of hidden size 1,024 each"
        return f"exchange with {hosts}, {rows}: {times}; --exchange auto would keep {self.kept}"


def between_hosts(comm: MPI.Intracomm | None, hosts: Sequence[str]) -> ExchangeFacts | None:
    """Time the exchange between hosts. Collective over `comm`; takes well under a second.

    Args:
        comm: The world; None for a single process.
        hosts: Host of every rank.

    Returns:
        None on ranks but 0, and if there is one host.
    """
    members = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if comm is None or len(members) < 2 or comm.rank not in members:
        return None
    from hpcdecode.exchange.collective import SLOWER
    from hpcdecode.exchange.communicators import subset
    from hpcdecode.exchange.probe import lane_end

    own = subset(comm, members)
    ways = ("messages", "collective")
    ends = {way: lane_end(own, _SHAPE, _ROWS * (own.size - 1), way) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, end in ends.items():
            start = perf_counter()
            end.round()
            seconds[way].append(perf_counter() - start)
    for end in ends.values():
        end.close()
    own.Free()
    if comm.rank:
        return None
    messages, collective = (median(seconds[way][_ROUNDS // 2 :]) * 1e6 for way in ways)
    kept = ways[collective <= SLOWER * messages]
    return ExchangeFacts(hosts=len(members) - 1, messages_us=messages, collective_us=collective, kept=kept)
