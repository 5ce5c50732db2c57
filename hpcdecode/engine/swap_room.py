"""The tiers below KV caches: whether a layout can use them, and their room and speed; collective over the team."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.open import block_bytes
from hpcdecode.attention.shapes import attention_shapes, recurrent_shapes
from hpcdecode.attention.sizes import bytes_per_token, footprint_for
from hpcdecode.attention.swapped_blocks import blocks_of
from hpcdecode.config import EngineOptions
from hpcdecode.engine.kv_swap import KvSwap, chunk_blocks, chunk_bytes
from hpcdecode.engine.setup import Setup, partition_of, together
from hpcdecode.engine.tier_speed import tier_speed
from hpcdecode.errors import UserError
from hpcdecode.ranks.team import Team
from hpcdecode.schedule.swaps import Swaps
from hpcdecode.system.memory import total_bytes
from hpcdecode.system.swap_tiers import TierSpec, open_tiers
from hpcdecode.system.tier import Tier

logger = logging.getLogger(__name__)


def measure_swap(options: EngineOptions, team: Team, setup: Setup) -> None:
    """Open and measure the tiers of each R-rank; the facts go to its `Rank`.

    Raises:
        UserError: If a tier of any rank cannot be opened; on every rank.
    """
    specs = options.swap_tiers
    if not specs or options.schedule == "fluid":
        return
    if why := obstacle(team, bool(recurrent_shapes(setup.shapes))):
        if team.lead:
            logger.info(f"--kv-swap: not used {why}; rows that give up their room are prefilled again")
        return
    together(team, lambda: _measure(options, team, setup, specs))


def obstacle(team: Team, keeps_states: bool) -> str:
    """Return what keeps K and V from tiers, given whether layers keep recurrent states, or nothing."""
    if any(len(group.members) > 1 for group in team.groups):
        return "with --tp, --pp or --route rotational"
    return "with layers that keep recurrent states" if keeps_states else ""


def _block(options: EngineOptions, team: Team, setup: Setup) -> tuple[int, int]:
    """Return the bytes of a block of this rank's KV cache, and the groups of layers that have blocks of their own."""
    own = list(map(partition_of(options, team.pool).shape, setup.shapes_of(team.me)))
    sizes, windowed, on_gpu = (setup.kv_dtype, setup.block_tokens), team.me.kv_windowed, team.me.kv_device != "cpu"
    groups = footprint_for(own, *sizes, 0, windowed, on_gpu).groups
    if on_gpu:
        whole = block_bytes(attention_shapes(own), *sizes, torch.device(team.me.kv_device), windowed)
    else:
        whole = bytes_per_token(own, *sizes, windowed) * setup.block_tokens
    return round(whole / groups), groups


def _measure(options: EngineOptions, team: Team, setup: Setup, specs: Sequence[TierSpec]) -> None:
    me = team.me
    if not me.has_r:
        return
    block, groups = _block(options, team, setup)
    blocks = chunk_blocks(block)
    size, tokens = chunk_bytes(block), blocks * setup.block_tokens
    small = [spec for spec in specs if spec.size < size]
    if small:
        raise UserError(
            f"--kv-swap: expected tiers of at least {size >> 10}K, {-(-tokens // groups)} tokens of this model, "
            f"got {small[0].size >> 10}K; give a larger size"
        )
    tiers = open_tiers(specs, size, total_bytes())
    me.swap_chunks, me.swap_chunk_tokens = sum(tier.chunks for tier in tiers), tokens
    me.swap_rate = min(_rate(tier, size) for tier in tiers) / size * me.swap_chunk_tokens
    for tier in tiers:
        tier.close()


def _rate(tier: Tier, chunk_bytes: int) -> float:
    """Return the bytes that a tier writes, or reads, in a second, the less of both; 0 if it does not work."""
    try:
        return tier_speed(tier, chunk_bytes).least
    except UserError:
        return 0.0


def open_swap(kv_cache: KvCache, specs: Sequence[TierSpec], cpus: Sequence[int] | None) -> KvSwap:
    """Open the tiers of this R-rank, as they were measured.

    Args:
        kv_cache: whose blocks move.
        specs: of the tiers.
        cpus: of the threads that move them, or None.
    """
    blocks = blocks_of(kv_cache)
    assert blocks is not None, "tiers are for KV caches whose blocks can be read"
    return KvSwap(kv_cache, open_tiers(specs, chunk_bytes(blocks.block_bytes), total_bytes()), cpus)


def swaps_of(options: EngineOptions, team: Team, footprint: Footprint) -> Swaps | None:
    """Return what this rank's group may use of its R-ranks' tiers, given what a sequence takes; None without tiers."""
    pools = team.group.pools
    ranks = [team.ranks[place] for place in pools[0]]
    if not ranks[0].swap_chunks:
        return None
    sharing = sum(other.pools == pools for other in team.groups)
    partition = partition_of(options, pools[0])
    chunks = partition.capacity([rank.swap_chunks // sharing for rank in ranks])
    rates = partition.speeds([rank.swap_rate for rank in ranks])
    return Swaps(chunks, ranks[0].swap_chunk_tokens, rates, footprint)
