"""What the S-rank's end of a lane sends over MPI: messages, in the groups in which they are packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention.shapes import MixerShape
from hpcdecode.exchange.base import PackedRows, Parcel
from hpcdecode.exchange.memory import HOST, Message
from hpcdecode.exchange.packing import Packing
from hpcdecode.exchange.partition import Partition, RankColumns

_PARTS, _LEAST_PART = 4, 128 << 10  # that leave a device one after the other, at most, and bytes of one at least


class Requests:
    """Several MPI requests as one."""

    def __init__(self) -> None:
        self.requests: list[MPI.Request] = []

    def Test(self) -> bool:
        """Return whether all are complete."""
        done = MPI.Request.Testall(self.requests)
        if done:
            self.requests.clear()
        return done


class Addressed(NamedTuple):
    """A message to an R-rank, by its rank in the lane's communicator."""

    rank: int
    message: Message


@dataclass
class Outgoing:
    """What the S-rank packs before it sends.

    Attributes:
        groups: messages that are packed together, by group.
        posts: messages that are sent.
        shape: of the whole layer.
        partition: of the lane.
    """

    groups: Sequence[Sequence[Addressed]]
    posts: Sequence[Addressed]
    shape: MixerShape
    partition: Partition

    @cached_property
    def packings(self) -> list[Packing]:
        """Return the rows on this host, and where they are packed."""
        return [Packing([post.message for post in posts], self._columns(posts[0].rank), HOST) for posts in self.groups]

    @cached_property
    def packed(self) -> list[PackedRows]:
        """Return the memory to be packed on a device."""
        return [message.packed(self._columns(rank)) for posts in self.groups for rank, message in posts]

    def pack(self, rows: Sequence[Tensor]) -> None:
        """Pack the rows of q, k and v, or of what else tokens bring."""
        for packing in self.packings:
            packing.pack(rows)

    def parts(self) -> list[Outgoing]:
        """Return its messages cut into a few parts, so that the first can be sent before the last are packed."""
        sizes = np.cumsum([message.rows.nbytes + message.prompts.nbytes for _, message in self.posts])
        step = max(-(-int(sizes[-1]) // _PARTS), _LEAST_PART)
        parts: dict[int, list[Addressed]] = {}
        for post, end in zip(self.posts, sizes.tolist(), strict=True):
            parts.setdefault((end - 1) // step, []).append(post)
        return [dataclasses.replace(self, groups=[posts], posts=posts) for posts in parts.values()]

    def _columns(self, rank: int) -> RankColumns | None:
        return self.partition.columns(self.shape, rank - 1) if self.partition.by_head else None


def outgoing_of(parcel: Parcel) -> Outgoing:
    """Return a parcel as what it is on a link over MPI."""
    assert isinstance(parcel, Outgoing), "expected a parcel of this link"
    return parcel
