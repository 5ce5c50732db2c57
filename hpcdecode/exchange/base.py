"""What crosses between an S-rank and its R-ranks, and in which order.

One link is one lane. Per layer the S-rank sends each R-rank its decode rows [q | k | v] and its prefill rows
[k | v], and receives the decode rows of the attention output o back. Both sides derive every size from the plan.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from hpcdecode.attention import LayerShape
from hpcdecode.schedule.plan import Plan


class SLink(Protocol):
    """The S-rank's end of a lane."""

    def begin(self, plan: Plan) -> None:
        """Announce the plan of the lane's next step."""

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Start the attention of `layer` over the lane's rows: q [T, Hq*Dk], k [T, Hkv*Dk], v [T, Hkv*Dv].

        The decode rows of o [T, Hq*Dv], which come first, are valid after `take`; the others are the caller's.
        """

    def wait(self) -> None:
        """Return when the attention posted last has arrived."""

    def take(self) -> None:
        """Put what has arrived where `post` was told to."""


class Share:
    """One R-rank's part of a plan: slots and counts as the KV store takes them, and its rows in the lane."""

    def __init__(self, plan: Plan, rank: int, first_slot: int = 0):
        decode = plan.decode[:, 0] == rank
        prefill = plan.prefill[:, 0] == rank
        self.release = plan.release[plan.release[:, 0] == rank, 1] + first_slot
        self.fork = plan.fork[plan.fork[:, 0] == rank, 1:] + first_slot  # rows (slot, new slot)
        self.decode_slots = plan.decode[decode, 1] + first_slot
        self.decode_counts = np.ones(len(self.decode_slots), np.int32)
        self.prefill_slots = plan.prefill[prefill, 1] + first_slot
        self.prefill_counts = np.ascontiguousarray(plan.prefill[prefill, 3])
        self.decode_rows = np.flatnonzero(decode)
        stretches = [np.arange(first, first + count) for first, count in plan.prefill[prefill, 2:].tolist()]
        self.prefill_rows = np.concatenate([np.empty(0, np.int64), *stretches])

    def elements(self, shape: LayerShape) -> int:
        """Elements that the R-rank receives for one layer."""
        return len(self.decode_rows) * shape.row_columns + len(self.prefill_rows) * shape.kv_columns


class Part(Protocol):
    """An R-part as a link drives it: see `workers.r_part.RPart`."""

    def begin(self, lane: int, share: Share) -> None: ...

    def attend(self, lane: int, layer: int, share: Share, rows: Tensor, prompts: Tensor, out: Tensor) -> None: ...
