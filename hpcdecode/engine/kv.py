"""Open what attends on a rank: its KV cache, and the attention of prompts."""

from __future__ import annotations

from functools import partial

import torch

from hpcdecode.attention.base import KvCache, PromptAttention
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.open import open_kv_cache, open_layers, open_on_device
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import attention_shapes, chooses_tokens
from hpcdecode.config import EngineOptions
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.fluid import open_rotation
from hpcdecode.engine.prefill import PromptKvCache, PromptsBeforeChoice, StoredPrompts
from hpcdecode.engine.resumed import ResumedAttention
from hpcdecode.engine.setup import Setup, apart, lookahead_of, partition_of
from hpcdecode.engine.swap_room import open_swap
from hpcdecode.exchange.device import CudaDevice
from hpcdecode.exchange.partition import Partition
from hpcdecode.model import SplitModel
from hpcdecode.ranks.team import Team
from hpcdecode.system.timeline import Timeline


def open_attention_worker(
    team: Team,
    setup: Setup,
    options: EngineOptions,
    slots: int,
    direct: bool,
    timeline: Timeline,
) -> AttentionWorker:
    """Open this rank's KV cache and what attends over it.

    Args:
        team: whose ranks have been told how much KV cache to hold.
        setup: of the model.
        options: of the engine.
        slots: sequences and prefixes at once, of all lanes.
        direct: whether q, k, v and o cross from device to device.
        timeline: of this rank.
    """
    partition, tiers = partition_of(options, team.pool), options.swap_tiers
    me, rank = team.me, team.pool.index(team.place)
    heads = [partition.heads(shape, rank) for shape in setup.shapes_of(me)]
    sinks = [None if s is None else torch.tensor(s[own]) for s, own in zip(setup.part_of(me).sinks, heads, strict=True)]
    queue = CudaDevice(torch.device(me.kv_device)) if me.kv_device != "cpu" and apart(team, team.group) else None
    if me.kv_resident:
        shapes, by_host = list(map(partition.shape, setup.shapes_of(me))), apart(team, team.group) and not direct
        kv_cache: KvCache = open_rotation(me, setup, shapes, slots, tiers, by_host)
    else:
        kv_cache = _open_kv_cache(team, setup, partition, slots, direct, lookahead_of(options))
    swap = open_swap(kv_cache, tiers, me.cpus if me.pinned else None) if me.swap_chunks else None
    return AttentionWorker(kv_cache, sinks, timeline, queue, swap)


def _open_kv_cache(team: Team, setup: Setup, partition: Partition, slots: int, direct: bool, lookahead: int) -> KvCache:
    me, whole = team.me, setup.shapes_of(team.me)
    shapes = list(map(partition.shape, whole))
    part, rank = setup.part_of(me), team.pool.index(team.place)
    weights = [
        part.recurrent[part.layers[0] + i].part(shape, partition, rank)
        for i, shape in enumerate(whole)
        if isinstance(shape, RecurrentShape)
    ]
    if me.kv_device != "cpu":
        return open_on_device(
            shapes,
            weights,
            kv_dtype=setup.kv_dtype,
            capacity_tokens=me.kv_tokens,
            max_sequences=slots,
            block_tokens=setup.block_tokens,
            state_tokens=setup.state_tokens,
            device=me.kv_device,
            host_tensors=apart(team, team.group) and not direct,
            windowed=me.kv_windowed,
            lookahead=lookahead,
        )
    return open_layers(
        shapes,
        weights,
        kv_dtype=setup.kv_dtype,
        capacity_tokens=me.kv_tokens,
        max_sequences=slots,
        block_tokens=setup.block_tokens,
        threads=me.threads,
        cpus=me.cpus if me.pinned else None,
        team=me.has_s,
        state_tokens=setup.state_tokens,
        windowed=me.kv_windowed,
        lookahead=lookahead,
    )


def open_prompts(team: Team, setup: Setup, model: SplitModel, beside: KvCache | None) -> PromptKvCache:
    """Open what attends from prompts on the S-rank, and holds their K and V meanwhile.

    Args:
        team: of this rank.
        setup: of the model.
        model: whose prompts attend.
        beside: a KV cache on the same cores, whose threads are used.
    """
    prompts: PromptAttention = _prompt_attention(team, setup, model, beside)
    shapes = attention_shapes(setup.shapes_of(team.me))
    if setup.kv_dtype != setup.dtype:
        prompts = StoredPrompts(prompts, shapes, setup.kv_dtype)
    if model.device.type == "cpu" and chooses_tokens(shapes):
        prompts = PromptsBeforeChoice(prompts, shapes)
    on_cpus = model.device.type == "cpu" and all(team.ranks[place].kv_device == "cpu" for place in team.pool)
    resumed = ResumedAttention(partial(_one_sequence, team, setup), shapes) if on_cpus else None
    return PromptKvCache(prompts, resumed)


def _one_sequence(team: Team, setup: Setup, tokens: int) -> KvCache:
    """Open a KV cache for one sequence."""
    return open_kv_cache(
        attention_shapes(setup.shapes_of(team.me)),
        kv_dtype=setup.kv_dtype,
        capacity_tokens=tokens,
        max_sequences=1,
        block_tokens=setup.block_tokens,
        threads=team.me.threads,
        team=True,
    )


def _prompt_attention(team: Team, setup: Setup, model: SplitModel, beside: KvCache | None) -> PromptAttention:
    me, shapes = team.me, attention_shapes(setup.shapes_of(team.me))
    if model.device.type != "cpu" or not shapes:
        return TorchPromptAttention(shapes, model.dtype, model.device)
    cpus = me.cpus if me.pinned else None
    if isinstance(beside, HybridKvCache):
        beside = beside.kv_cache
    return CpuPromptAttention(shapes, dtype=setup.dtype, threads=me.threads, cpus=cpus, beside=beside)
