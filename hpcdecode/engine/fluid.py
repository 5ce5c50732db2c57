"""The schedule `fluid`: KV caches of R-ranks that are larger than their memory, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcdecode.attention.page_sizes import PageSizes, page_sizes
from hpcdecode.attention.shapes import LayerShape, RecurrentShape, attention_shapes, recurrent_shapes
from hpcdecode.attention.streamed import StreamedKvCache
from hpcdecode.config import EngineOptions
from hpcdecode.engine.setup import Setup
from hpcdecode.engine.swap_room import page_obstacle
from hpcdecode.engine.tier_speed import tier_speed
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.system.memory import total_bytes
from hpcdecode.system.swap_tiers import TierSpec, open_tiers
from hpcdecode.system.tier import Tier


class GroupRotation(msgspec.Struct, frozen=True):
    """KV caches larger than their memory, those of all R-ranks of a group together.

    Attributes:
        capacity: Tokens in memory and tiers.
        resident: Tokens that memory has room for.
        rate: Tokens that all tiers bring in a second.
    """

    capacity: int
    resident: int
    rate: float

    def moved_tokens(self, cached_tokens: float) -> float:
        """Return the tokens that come in during a step that attends to so many."""
        return max(min(cached_tokens, self.capacity) - self.resident, 0.0)

    def least_step_seconds(self, cached_tokens: float) -> float:
        """Return the seconds in which a step's K and V come in: it takes no less."""
        return self.moved_tokens(cached_tokens) / self.rate

    def text(self) -> str:
        """Return what a log says of it."""
        full = self.least_step_seconds(self.capacity)
        return (
            f"rotation of groups: {self.resident / self.capacity:.0%} of {self.capacity:,} KV tokens lie in memory, "
            f"tiers bring {self.rate:,.0f} tokens/s: a step takes {full:.2g} s at least when all are in use"
        )


def require_rotation(options: EngineOptions, team: Team, setup: Setup) -> None:
    """Raise UserError, on every rank, if a layout has no rotation of groups under the schedule `fluid`."""
    if options.schedule == "fluid" and (why := page_obstacle(team, bool(recurrent_shapes(setup.shapes)))):
        raise UserError(
            f"--schedule fluid: expected KV caches on CPUs, of whole layers that all attend, got one {why}; "
            "choose another --schedule",
            everywhere=True,
        )


def measure_rotation(options: EngineOptions, team: Team, setup: Setup, own: Sequence[LayerShape], memory: int) -> int:
    """Return the KV tokens that this R-rank holds in memory and tiers, and measure the tiers.

    Args:
        options: Of the engine.
        team: Of this rank.
        setup: Of the model.
        own: Shapes of what this rank has of the layers.
        memory: Bytes of the KV cache in memory.

    Raises:
        UserError: If tiers or memory are too small.
    """
    me = team.me
    me.kv_resident = memory
    sizes = _sizes(setup, own, memory, options.swap_tiers)
    tiers = open_pages(sizes, options.swap_tiers)
    range_tokens = sizes.range_blocks * setup.block_tokens
    token = sizes.page_bytes * sizes.layers / range_tokens
    me.kv_resident_tokens = int(memory / token)
    me.swap_rate = min(tier_speed(tier, sizes.page_bytes).read_rate for tier in tiers) / token
    for tier in tiers:
        tier.close()
    return sizes.ranges * range_tokens


def _sizes(setup: Setup, own: Sequence[LayerShape], memory: int, tiers: Sequence[TierSpec]) -> PageSizes:
    return page_sizes(own, setup.kv_dtype, setup.block_tokens, memory, [tier.size for tier in tiers])


def open_pages(sizes: PageSizes, specs: Sequence[TierSpec]) -> list[Tier]:
    """Open tiers with as many pages as are in use, and take their room."""
    left, tiers = sizes.ranges * sizes.layers, []
    for spec in specs:
        pages = min(spec.size // sizes.chunk_bytes, left)
        left -= pages
        own = TierSpec(spec.kind, pages * sizes.chunk_bytes, spec.directory, spec.rate)
        tier = open_tiers([own], sizes.chunk_bytes, total_bytes())[0]
        try:
            tier.reserve()
        except OSError as error:
            tier.close()
            raise UserError(
                f"--kv-swap {spec.kind}:{spec.directory}: expected room for {own.size >> 20}M of the KV cache, "
                f"got: {error.strerror}; give a smaller size, or another directory"
            ) from error
        if tier.chunks:
            tiers.append(tier)
    return tiers


def rotation_of(team: Team) -> GroupRotation | None:
    """Return the rotation of this rank's group, or None if all K and V lie in memory."""
    ranks = [team.ranks[place] for place in team.group.pools[0]]
    if not ranks[0].kv_resident:
        return None
    sharing = sum(other.pools == team.group.pools for other in team.groups)
    capacity = sum(rank.kv_tokens for rank in ranks) // sharing
    resident = sum(rank.kv_resident_tokens for rank in ranks) // sharing
    return GroupRotation(capacity, resident, sum(rank.swap_rate for rank in ranks) / sharing)


def open_rotation(
    me: Rank, setup: Setup, own: Sequence[LayerShape | RecurrentShape], slots: int, specs: Sequence[TierSpec]
) -> StreamedKvCache:
    """Open the KV cache of this R-rank, as it was measured.

    Args:
        me: This rank.
        setup: Of the model.
        own: Shapes of what this rank has of the layers.
        slots: Sequences and prefixes at once, of all lanes.
        specs: Of the tiers.
    """
    layers, cpus = attention_shapes(own), me.cpus if me.pinned else None
    sizes = _sizes(setup, layers, me.kv_resident, specs)
    tiers = open_pages(sizes, specs)
    return StreamedKvCache(layers, setup.kv_dtype, sizes, tiers, slots, setup.block_tokens, me.threads, cpus, me.has_s)
