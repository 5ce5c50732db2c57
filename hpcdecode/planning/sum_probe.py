"""What the sums of members cost on the ranks of a job, for every number of members that a model allows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdecode.attention.shapes import MixerShape
from hpcdecode.mpi.collectives import gather_all
from hpcdecode.mpi.wait import waited
from hpcdecode.planning.fit import non_negative_fit
from hpcdecode.planning.layer_work import dealt_heads
from hpcdecode.planning.profile import MemberCosts

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.sums import MpiSums

_TOKENS = (1, 16, 64, 256, 1024)
_REPEATS = 9


def member_counts(ranks: int, layers: Sequence[MixerShape]) -> list[int]:
    """Return the numbers of members that divide the ranks, and the heads of every layer."""
    heads = dealt_heads(layers)
    return [tp for tp in range(2, ranks + 1) if ranks % tp == 0 and all(each % tp == 0 for each in heads)]


def measure_sums(comm: MPI.Intracomm, columns: int, dtype: torch.dtype, counts: Sequence[int]) -> list[MemberCosts]:
    """Return the costs of sums of `columns` columns; every rank calls this.

    Args:
        comm: Of all ranks; members of a group are next to each other, as in jobs.
        columns: Of the residual.
        dtype: Of the shares.
        counts: Numbers of members, which divide the ranks.
    """
    return [_measured(comm, columns, dtype, members) for members in counts]


def _measured(comm: MPI.Intracomm, columns: int, dtype: torch.dtype, members: int) -> MemberCosts:
    from mpi4py import MPI

    from hpcdecode.exchange.sums import MpiSums

    group = MPI.Intracomm(comm.Split(comm.rank // members, comm.rank))
    sums, seconds = MpiSums(group), []
    for tokens in _TOKENS:
        share = torch.ones(tokens, columns, dtype=dtype)
        took = [_seconds(sums, share) for _ in range(_REPEATS)]
        seconds.append(max(gather_all(comm, median(took[1:]), float)))  # the first one touches new memory
    group.Free()
    latency, per_token = non_negative_fit([(1, tokens) for tokens in _TOKENS], seconds)
    return MemberCosts(members, latency, per_token)


def _seconds(sums: MpiSums, share: Tensor) -> float:
    begin = perf_counter()
    waited(sums.add(share))
    return perf_counter() - begin
