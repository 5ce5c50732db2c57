"""Groups of a simulation whose R-ranks have tiers: for pages under `--schedule fluid`, else for whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.page_sizes import PageSizes, page_sizes
from hpcdecode.attention.reach import reach_of
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, attention_shapes, recurrent_shapes
from hpcdecode.attention.sizes import block_tokens_for, bytes_per_token, footprint_for
from hpcdecode.engine.kv_swap import chunk_blocks, chunk_bytes
from hpcdecode.engine.tier_speed import TierSpeed, speed_here
from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_simulator import JobGroup
from hpcdecode.planning.packed_attention import PackedAttention
from hpcdecode.planning.simulated_ranks import PagedCache, RotatingRank, SimulatedRank, SwappingRank
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.swaps import Swaps
from hpcdecode.system.swap_tiers import TierSpec


class TieredMemory(msgspec.Struct, frozen=True):
    """The memory of an R-rank and what is below it.

    Attributes:
        layers: Shapes of the model's layers.
        kv_dtype: Data type of the KV cache.
        memory: Bytes of the KV cache in memory.
        tiers: Below it.
        rotates: Whether pages move, under the schedule `fluid`; else whole sequences.
        cores: Of an R-rank, over which attention is packed.
        here: Whether R-ranks are on this machine: tiers with a rate are measured, too.
    """

    layers: list[LayerShape | RecurrentShape]
    kv_dtype: str
    memory: int
    tiers: list[TierSpec]
    rotates: bool
    cores: int = 1
    here: bool = False

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a KV block."""
        return block_tokens_for(self.layers, self.kv_dtype)

    @property
    def token_bytes(self) -> float:
        """Return the bytes of a token."""
        return bytes_per_token(self.layers, self.kv_dtype, self.block_tokens, not self.rotates)

    @property
    def footprint(self) -> Footprint:
        """Return what a sequence takes."""
        return footprint_for(self.layers, self.kv_dtype, self.block_tokens, 0, not self.rotates)

    @property
    def sizes(self) -> PageSizes:
        """Return the pages of an R-rank, or raise UserError."""
        shapes = attention_shapes(self.layers)
        return page_sizes(shapes, self.kv_dtype, self.block_tokens, self.memory, [tier.size for tier in self.tiers])

    def capacity(self) -> int:
        """Return the KV tokens of an R-rank, as a job counts them.

        Raises:
            UserError: If tiers or memory are too small, or the model keeps recurrent states.
        """
        if recurrent_shapes(self.layers):
            raise UserError("--kv-swap: expected a model whose layers all attend, got one that keeps recurrent states")
        if self.rotates:
            sizes = self.sizes
            return sizes.ranges * sizes.range_blocks * self.block_tokens
        return int(self.memory / self.token_bytes) // self.block_tokens * self.block_tokens

    def speeds(self) -> list[TierSpeed]:
        """Return how fast the tiers are: as they are here, which is measured, or by the rate that is given.

        Raises:
            UserError: If one cannot be opened.
        """
        size = self.sizes.page_bytes if self.rotates else chunk_bytes(self._block_bytes)
        given = [None if self.here or not tier.rate else TierSpeed(tier.rate, tier.rate) for tier in self.tiers]
        return [speed or speed_here(tier, size) for tier, speed in zip(self.tiers, given, strict=True)]

    @property
    def _block_bytes(self) -> int:
        return round(self.token_bytes * self.block_tokens / self.footprint.groups)


def job_group(
    memory: TieredMemory, cost: Cost, limits: list[LaneLimits], r_ranks: int, admission: str, speeds: list[TierSpeed]
) -> JobGroup:
    """Return a group whose R-ranks have tiers.

    Args:
        memory: Of each R-rank.
        cost: Of the group.
        limits: Of its lanes.
        r_ranks: Number of R-ranks; 0 for a rank of both roles.
        admission: `reserve` or `optimistic`.
        speeds: Of the tiers.
    """
    if memory.rotates and not r_ranks:
        cost = cost.with_pages()
    count, slots = max(r_ranks, 1), sum(lane.slots for lane in limits)
    make = _rotating if memory.rotates else _swapping
    swaps = None if memory.rotates or not memory.tiers else partial(_swaps, memory, count, speeds)
    ranks = partial(make, memory, cost, slots, count, speeds)
    capacity = [memory.capacity()] * count
    attention, reach = None if r_ranks else _attention(memory), reach_of(memory.layers)
    return JobGroup(cost, capacity, limits, memory.footprint, ranks, not r_ranks, admission, swaps, attention, reach)


def _attention(memory: TieredMemory) -> PackedAttention:
    shapes = attention_shapes(memory.layers)
    return PackedAttention(shapes, memory.kv_dtype, memory.block_tokens, memory.cores, not memory.rotates)


def _rotating(
    memory: TieredMemory, cost: Cost, slots: int, count: int, speeds: Sequence[TierSpeed]
) -> list[SimulatedRank]:
    sizes, shapes = memory.sizes, attention_shapes(memory.layers)
    left, pages = sizes.ranges * sizes.layers, []
    for tier, speed in zip(memory.tiers, speeds, strict=True):
        own = min(tier.size // sizes.chunk_bytes, left)
        left -= own
        pages += [(own, speed)] if own else []
    like = shapes, memory.kv_dtype, sizes, pages, slots, memory.block_tokens
    return [RotatingRank(PagedCache(*like), cost) for _ in range(count)]


def _swapping(
    memory: TieredMemory, cost: Cost, slots: int, count: int, speeds: Sequence[TierSpeed]
) -> list[SimulatedRank]:
    slowest = min(speeds, key=lambda speed: speed.least, default=None)
    return [SwappingRank(cost, slowest, memory.token_bytes, slots) for _ in range(count)]


def _swaps(memory: TieredMemory, count: int, speeds: Sequence[TierSpeed]) -> Swaps:
    blocks, size = chunk_blocks(memory._block_bytes), chunk_bytes(memory._block_bytes)
    tokens = blocks * memory.block_tokens
    rate = min(speed.least for speed in speeds) / size * tokens
    return Swaps([sum(tier.size // size for tier in memory.tiers)] * count, tokens, [rate] * count, memory.footprint)
