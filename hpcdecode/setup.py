"""What every rank of a job must know before it starts, as the lead sends it out."""

from __future__ import annotations

import msgspec

from hpcdecode.attention import LayerShape
from hpcdecode.schedule.injector import Limits


class Setup(msgspec.Struct):
    """What the lead knows of the model and every rank needs."""

    shapes: list[LayerShape]
    sinks: list[list[float] | None]
    dtype: str
    kv_dtype: str
    max_positions: int | None
    weight_bytes: int


class Scale(msgspec.Struct):
    """The resolved size of the job. lane_batches: B of every lane, by S-rank."""

    batch: int
    period: int
    steps: int
    lane_batches: list[list[int]]

    @property
    def slots(self) -> int:
        """Sequences that any lane may hold at once."""
        return max(Limits(b, 1, 1, 1, None).slots for lanes in self.lane_batches for b in lanes)

    def lane_number(self, s_rank: int, lane: int) -> int:
        """A lane's number among those of all S-ranks."""
        return sum(len(lanes) for lanes in self.lane_batches[:s_rank]) + lane
