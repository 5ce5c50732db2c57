"""The schedule `fluid`: KV caches of R-ranks that are larger than their memory, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.frame_copies import PinnedMemory, link_rate
from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.open import by_kernels
from hpcdecode.attention.page_sizes import PageSizes, page_sizes
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, attention_shapes, recurrent_shapes
from hpcdecode.attention.streamed import StreamedKvCache
from hpcdecode.attention.streamed_cuda import StreamedCudaKvCache
from hpcdecode.config import EngineOptions
from hpcdecode.engine.setup import Setup
from hpcdecode.engine.swap_room import obstacle
from hpcdecode.engine.tier_speed import tier_speed
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.system.memory import total_bytes
from hpcdecode.system.swap_tiers import TierSpec, open_tiers
from hpcdecode.system.tier import Chunk, Tier


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
    if options.schedule == "fluid" and (why := obstacle(team, bool(recurrent_shapes(setup.shapes)))):
        raise UserError(
            f"--schedule fluid: expected KV caches of whole layers that all attend, got one {why}; "
            "choose another --schedule",
            everywhere=True,
        )


def measure_rotation(options: EngineOptions, team: Team, setup: Setup, own: Sequence[LayerShape], memory: int) -> int:
    """Return the KV tokens that this R-rank holds in memory and tiers, and measure the tiers and a GPU's link to them.

    Args:
        options: Of the engine.
        team: Of this rank.
        setup: Of the model.
        own: Shapes of what this rank has of the layers.
        memory: Bytes of the KV cache in memory.

    Raises:
        UserError: If tiers or memory are too small, or a GPU has no kernels for the layers.
    """
    me = team.me
    device = _gpu_of(me)
    if device is not None and not by_kernels(own, setup.kv_dtype, device):
        raise UserError(
            f"--schedule fluid: expected layers that a GPU has kernels for, got some that torch's operations attend "
            f"to, with --kv-dtype {setup.kv_dtype}; choose another --schedule"
        )
    me.kv_resident = memory
    sizes = _sizes(me, setup, own, options.swap_tiers)
    tiers = open_pages(sizes, options.swap_tiers)
    range_tokens = sizes.range_blocks * setup.block_tokens
    token = sizes.page_bytes * sizes.layers / range_tokens
    me.kv_resident_tokens = int(memory / token)
    rates = [tier_speed(tier, sizes.page_bytes).read_rate for tier in tiers]
    if device is not None:
        rates.append(link_rate(device, sizes.page_bytes))
    me.swap_rate = min(rates) / token
    for tier in tiers:
        tier.close()
    return sizes.ranges * range_tokens


def _gpu_of(me: Rank) -> torch.device | None:
    """Return the GPU that has a rank's KV cache, or None."""
    return None if me.kv_device == "cpu" else torch.device(me.kv_device)


def _sizes(me: Rank, setup: Setup, own: Sequence[LayerShape], tiers: Sequence[TierSpec]) -> PageSizes:
    sizes = [tier.size for tier in tiers]
    return page_sizes(own, setup.kv_dtype, setup.block_tokens, me.kv_resident, sizes, _gpu_of(me))


def open_pages(
    sizes: PageSizes, specs: Sequence[TierSpec], allocate: Callable[[int], Chunk] | None = None
) -> list[Tier]:
    """Open tiers with as many pages as are in use, and take their room.

    Args:
        sizes: Of pages.
        specs: Of the tiers.
        allocate: Returns memory of this host of so many bytes; None for any memory.
    """
    left, tiers = sizes.ranges * sizes.layers, []
    for spec in specs:
        pages = min(spec.size // sizes.chunk_bytes, left)
        left -= pages
        own = TierSpec(spec.kind, pages * sizes.chunk_bytes, spec.directory, spec.rate)
        tier = open_tiers([own], sizes.chunk_bytes, total_bytes(), allocate)[0]
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
    me: Rank,
    setup: Setup,
    own: Sequence[LayerShape | RecurrentShape],
    slots: int,
    specs: Sequence[TierSpec],
    host_tensors: bool = False,
) -> KvCache:
    """Open the KV cache of this R-rank, as it was measured.

    Args:
        me: This rank.
        setup: Of the model.
        own: Shapes of what this rank has of the layers.
        slots: Sequences and prefixes at once, of all lanes.
        specs: Of the tiers.
        host_tensors: Whether rows and outputs of a KV cache on a GPU are in this host's memory.
    """
    layers, cpus = attention_shapes(own), me.cpus if me.pinned else None
    sizes, device = _sizes(me, setup, layers, specs), _gpu_of(me)
    if device is not None:
        tiers, room = open_pages(sizes, specs, PinnedMemory(device).take), (slots, setup.block_tokens)
        kv_cache = StreamedCudaKvCache(layers, setup.kv_dtype, sizes, tiers, *room, device, cpus)
        return HostKvCache(kv_cache, device) if host_tensors else kv_cache
    tiers = open_pages(sizes, specs)
    return StreamedKvCache(layers, setup.kv_dtype, sizes, tiers, slots, setup.block_tokens, me.threads, cpus, me.has_s)
