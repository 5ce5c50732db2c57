"""The room for KV caches and how fast R-ranks read them, collective over the team."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from hpcdecode.attention.base import isa
from hpcdecode.attention.open import device_capacity, torch_bytes
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, attention_shapes
from hpcdecode.attention.sizes import bytes_per_token, capacity_for
from hpcdecode.config import EngineOptions
from hpcdecode.engine.fluid import measure_rotation, require_rotation
from hpcdecode.engine.setup import Setup, drops_windows, partition_of, together
from hpcdecode.engine.swap_room import measure_swap
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.system.bandwidth import read_rate
from hpcdecode.system.memory import address_space_headroom, anonymous_bytes, available_bytes, total_bytes

_MEMORY_SHARE = 0.7  # of what is available, for the KV caches of a host
_PREFIX_SHARE = 0.125  # of what is available, for K and V of live prefixes on the S-ranks of a host
_LEAST_PREFIX_BYTES = 1 << 30  # of an S-rank
_DRAFT_SHARE = 0.1  # of what is available, for K and V of a second model on the S-ranks of a host


def measure_room(options: EngineOptions, team: Team, setup: Setup) -> None:
    """Settle how many KV tokens each R-rank and its tiers hold, and let everybody know."""
    me = team.me
    own = list(map(partition_of(options, team.pool).shape, setup.shapes_of(me))) if me.role else []
    me.kv_windowed = drops_windows(options, me, own, setup.kv_dtype)
    measure_swap(options, team, setup)
    require_memory(options, team)
    require_rotation(options, team, setup)
    room = together(team, lambda: _room(options, team, setup, own) if me.has_r else 0)
    if me.has_r:
        me.isa, me.kv_tokens = isa() if me.kv_device == "cpu" else "", room
        if me.device == me.kv_device:
            beside: float = me.kv_resident
            if torch_bytes(own, setup.kv_dtype, me.kv_device):
                beside = 0.0
            elif not beside:
                beside = me.kv_tokens * bytes_per_token(own, setup.kv_dtype, windowed=me.kv_windowed)
            limit_torch(me.device, options.gpu_memory, beside)
    team.ranks[:] = team.gather_all(me, Rank)
    for rank in team.ranks:
        if rank.has_r and rank.kv_tokens < 1:
            raise UserError(
                f"rank {rank.rank} on {rank.host} has no room for a KV cache: this model needs "
                f"{bytes_per_token(own, setup.kv_dtype):,.0f} bytes a token, in blocks of "
                f"{setup.block_tokens} tokens; raise --kv-memory, or give the rank more memory",
                everywhere=True,
            )


def require_memory(options: EngineOptions, team: Team) -> None:
    """Raise UserError, on every rank, if a size that is given is more than a host or a GPU has in all.

    A host has what its control group and Slurm allow, less what its ranks hold already, weights above all. What others
    use at this moment does not count: a KV cache takes its memory as it fills.
    """
    if options.kv_memory is None and options.gpu_memory is None:
        return
    held = team.gather_all(anonymous_bytes(), int)

    def check() -> None:
        _require_host(options, team, held)
        _require_device(options, team)

    together(team, check)


def _require_host(options: EngineOptions, team: Team, held: list[int]) -> None:
    here = [(rank, nbytes) for rank, nbytes in zip(team.ranks, held, strict=True) if rank.host == team.me.host]
    caches = sum(rank.has_r and rank.kv_device == "cpu" for rank, _ in here)
    total, taken = total_bytes(), sum(nbytes for _, nbytes in here)
    if caches and options.kv_memory is not None and caches * options.kv_memory > total - taken:
        most = max(total - taken, 0) // caches
        raise UserError(
            f"--kv-memory: expected at most {_size(most)} for each of {caches} R-ranks on {team.me.host}, which has "
            f"{_size(total)} in all and whose ranks hold {_size(taken)} already, got {_size(options.kv_memory)}; "
            "lower it, or leave it out"
        )
    addresses = address_space_headroom()
    if team.me.has_r and addresses is not None and (options.kv_memory or 0) > addresses:
        raise UserError(
            f"--kv-memory: expected at most {_size(addresses)}, which the address space of a process leaves "
            f"(ulimit -v), got {_size(options.kv_memory or 0)}; lower it, or raise that limit"
        )


def _require_device(options: EngineOptions, team: Team) -> None:
    me, sharing = team.me, _on_same_gpu(team)
    if not sharing:
        return
    caches = [rank for rank in sharing if rank.has_r and rank.kv_device != "cpu"]
    for flag, nbytes, users in (("kv-memory", options.kv_memory, caches), ("gpu-memory", options.gpu_memory, sharing)):
        if nbytes is None or me not in users:
            continue
        total = torch.cuda.get_device_properties(me.gpu).total_memory
        if nbytes * len(users) > total:
            each = f" for each of {len(users)} ranks" * (len(users) > 1)
            raise UserError(
                f"--{flag}: expected at most {_size(total // len(users))}{each}, as {me.gpu} on {me.host} has "
                f"{_size(total)}, got {_size(nbytes)}; lower it, or leave it out"
            )


def _on_same_gpu(team: Team) -> list[Rank]:
    """Return the ranks that compute on the GPU of this one, itself among them; none if it computes on none."""
    own = team.me.gpu_name
    return [rank for rank in team.ranks if rank.gpu_name == own] if own else []


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):,.1f}G" if nbytes >= 1 << 30 else f"{nbytes >> 20}M"


def measure_speeds(team: Team) -> None:
    """Let every rank know how fast R-ranks read, if they are unlike; those that are alike have their median."""
    kinds = {r.rank: (torch.device(r.kv_device).type, r.threads, r.isa) for r in team.ranks if r.has_r}
    if len(set(kinds.values())) == 1:
        return
    found = team.gather_all(_read_rate(team.me) if team.me.has_r else 0.0, float)
    rates: dict[tuple[str, int, str], list[float]] = {}
    for rank, rate in zip(team.ranks, found, strict=True):
        if rank.has_r:
            rates.setdefault(kinds[rank.rank], []).append(rate)
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    for rank in (r for r in team.ranks if r.has_r):
        rank.speed = medians[kinds[rank.rank]] / min(medians.values())
    team.me.speed = team.ranks[team.place].speed


def _read_rate(me: Rank) -> float:
    """Return the bytes of the KV cache that a rank can read in a second."""
    if me.kv_device == "cpu":
        return read_rate(me.cpus if me.pinned else [], me.threads)
    from hpcdecode.attention.cuda import copy_rate

    return copy_rate(torch.device(me.kv_device))


def _room(options: EngineOptions, team: Team, setup: Setup, own: list[LayerShape | RecurrentShape]) -> int:
    """Return the KV tokens that this R-rank holds."""
    device = torch.device(team.me.kv_device)
    if device.type == "cpu":
        nbytes = _kv_bytes(options, team, setup)
    else:
        nbytes = options.kv_memory or int(_free_on(device, options.gpu_memory, _on_same_gpu(team)) * _MEMORY_SHARE)
    if options.schedule == "fluid":
        return measure_rotation(options, team, setup, attention_shapes(own), nbytes)
    sizes = setup.kv_dtype, nbytes, setup.block_tokens, setup.state_tokens
    if device.type == "cpu":
        return capacity_for(own, *sizes, team.me.kv_windowed)
    return device_capacity(own, *sizes, device, team.me.kv_windowed)


def _free_on(device: torch.device, limit: int | None, sharing: Sequence[Rank]) -> int:
    """Return the bytes of a GPU that this process may take, beside those that its S-rank holds there.

    What is free is for the KV caches of all ranks that share the GPU; each measures it before any of them opens.
    """
    free = torch.cuda.mem_get_info(device)[0] // max(sum(r.has_r and r.kv_device != "cpu" for r in sharing), 1)
    return free if limit is None else max(min(free, limit - torch.cuda.memory_reserved(device)), 0)


def limit_torch(device: str, limit: int | None, beside: float = 0.0) -> None:
    """Let torch take no more of a GPU than `--gpu-memory`, less the KV cache that lies `beside`."""
    if limit is not None and device != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(max(limit - beside, 0) / total, 1.0), device)


def _kv_bytes(options: EngineOptions, team: Team, setup: Setup) -> int:
    if options.kv_memory is not None:
        return options.kv_memory
    here = [r for r in team.ranks if r.host == team.me.host]
    mapped = setup.mapped_bytes if any(r.has_s and r.device == "cpu" for r in here) else 0  # seem to be available
    return kv_share(available_bytes(), mapped, sum(r.has_r for r in here))


def prefix_bytes(options: EngineOptions, team: Team, setup: Setup) -> int:
    """Return the bytes that this S-rank, which has its weights, may take for K and V of what prompts share.

    On a GPU with a KV cache these have been set aside.
    """
    beside = _on_same_gpu(team) if team.me.device != "cpu" else []
    if any(rank.has_r and rank.kv_device != "cpu" for rank in beside):
        return _LEAST_PREFIX_BYTES
    return max(_of_s_rank(options, team, setup, _PREFIX_SHARE), _LEAST_PREFIX_BYTES)


def draft_bytes(options: EngineOptions, team: Team, setup: Setup) -> int:
    """Return the bytes that this S-rank, which has its weights, may take for K and V of a second model."""
    return _of_s_rank(options, team, setup, _DRAFT_SHARE)


def _of_s_rank(options: EngineOptions, team: Team, setup: Setup, share: float) -> int:
    """Return the bytes for this S-rank of a share of what is free on its device."""
    if team.me.device != "cpu":
        sharing = _on_same_gpu(team)
        free = _free_on(torch.device(team.me.device), options.gpu_memory, sharing)
        return int(free * share / max(sum(rank.has_s for rank in sharing), 1))
    s_ranks = sum(rank.has_s for rank in team.ranks if rank.host == team.me.host)
    return kv_share(available_bytes(), setup.mapped_bytes, s_ranks, share)


def kv_share(available: int, weights: int, ranks: int, share: float = _MEMORY_SHARE) -> int:
    """Return the bytes for K and V of each of a host's R-ranks, or others, of what is free beside weights to come."""
    return int(max(available - weights, 0) * share / ranks)
