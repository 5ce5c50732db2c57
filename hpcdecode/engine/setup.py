"""What an engine settles before it works, collective over the team: the model, the room for KV, B, F and lanes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch

from hpcdecode.attention.base import (
    LayerShape,
    block_tokens_for,
    bytes_per_token,
    capacity_for,
    isa,
    multiplies_bfloat16,
)
from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import UserError
from hpcdecode.exchange.partition import Partition
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.config import stated_dtype
from hpcdecode.ranks.launch import Team
from hpcdecode.ranks.roles import Rank
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import choose, load_limit, mean_prompt, split
from hpcdecode.schedule.limits import LaneLimits, prefill_limit
from hpcdecode.system.bandwidth import read_rate
from hpcdecode.system.memory import address_space_headroom, anonymous_bytes, available_bytes, total_bytes

T = TypeVar("T")
_MEMORY_SHARE = 0.7  # of what is available, for the KV caches of a host


class Setup(msgspec.Struct, frozen=True):
    """What the lead knows of the model and every rank needs."""

    shapes: list[LayerShape]
    sinks: list[list[float] | None]
    dtype: str
    kv_dtype: str
    block_tokens: int
    max_positions: int | None
    weight_bytes: int
    eos: frozenset[int]


class Scale(msgspec.Struct, frozen=True):
    """The sizes of the work.

    Attributes:
        batch, period, steps: B, F and S.
        load: W_lim, tokens that sequences attend to in a step.
        prefill_tokens: the most prompt tokens of a lane's step.
        lane_batches: B of every lane, by S-rank.
    """

    batch: int
    period: int
    steps: int
    load: int
    prefill_tokens: int
    lane_batches: list[list[int]]

    @property
    def slots(self) -> int:
        """Return how many sequences any lane may hold at once."""
        return max(LaneLimits(b, 1, 1, 1, None).slots for lanes in self.lane_batches for b in lanes)

    @property
    def lanes(self) -> int:
        """Return the number of lanes of all S-ranks."""
        return sum(map(len, self.lane_batches))


def apart(team: Team) -> bool:
    """Return whether q, k, v and o cross in host memory; not if one process has both roles on one device."""
    return team.comm is not None or team.me.device != team.me.kv_device


def direct(options: EngineOptions, team: Team) -> bool:
    """Return whether they cross from device to device: every rank computes on one, and MPI takes its memory."""
    return options.gpu_mpi and all(r.gpu_mpi and not r.uses_cores for r in team.ranks)


class Loaded(NamedTuple):
    """What an S-rank has: the model with its weights, and its tokenizer."""

    model: SplitModel
    tokenizer: Tokenizer


def load(options: EngineOptions, team: Team, model: SplitModel | None = None) -> tuple[Setup, Loaded | None]:
    """Load the model and its tokenizer on the S-ranks.

    Args:
        options: of the engine.
        team: the ranks and their roles.
        model: one loaded before.

    Raises:
        UserError: of any rank, on every rank.
    """

    def own() -> tuple[Setup | None, Loaded | None]:
        if not team.me.has_s:
            return None, None
        device = team.me.device
        if options.compile and device == "cpu":
            raise UserError(
                "--compile: expected S-ranks on GPUs, got cpu, where slices are compiled in any case; leave it out"
            )
        tokenizer = Tokenizer.load(options.model)
        dtype = options.dtype or auto_dtype(options.model, device)
        ways = {"int8": options.weights == "int8", "inductor": options.compile, "announce": team.lead}
        loaded = model or load_split(options.model, dtype=dtype, device=device, **ways)
        partition_of(options, team).check(loaded.attends)
        return _describe(options, loaded, tokenizer) if team.lead else None, Loaded(loaded, tokenizer)

    setup, loaded = together(team, own)
    return team.broadcast(setup, Setup), loaded


def together(team: Team, action: Callable[[], T]) -> T:
    """Return what `action` returns on this rank; raise the UserError of any rank on every rank."""
    results, problem = [], ""
    try:
        results.append(action())
    except UserError as error:
        problem = str(error)
    problems = [p for p in team.gather_all(problem, str) if p]
    if problems:
        raise UserError(problems[0], everywhere=True)
    return results[0]


def partition_of(options: EngineOptions, team: Team) -> Partition:
    """Return how the attention is spread over the team's R-ranks."""
    return Partition(options.partition, len(team.r_ranks))


def measure_room(options: EngineOptions, team: Team, setup: Setup) -> None:
    """Settle how many KV tokens each R-rank holds, and let everybody know."""
    require_memory(options, team)
    me, own = team.me, list(map(partition_of(options, team).shape, setup.shapes))
    if me.has_r:
        me.isa = isa() if me.kv_device == "cpu" else ""
        me.kv_tokens = _room(options, team, setup, own)
        if me.device == me.kv_device:
            limit_torch(me.device, options.gpu_memory, me.kv_tokens * bytes_per_token(own, setup.kv_dtype))
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
        _require_device(options, team.me)

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


def _require_device(options: EngineOptions, me: Rank) -> None:
    asked = [("kv-memory", options.kv_memory, me.kv_device)] if me.has_r else []
    asked += [("gpu-memory", options.gpu_memory, device) for device in (me.device, me.kv_device)]
    for flag, nbytes, device in asked:
        if nbytes is None or device == "cpu" or not torch.cuda.is_available():  # tests emulate devices
            continue
        total = torch.cuda.get_device_properties(device).total_memory
        if nbytes > total:
            raise UserError(
                f"--{flag}: expected at most {_size(total)}, which {device} on {me.host} has, got {_size(nbytes)}; "
                "lower it, or leave it out"
            )


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


def choose_scale(options: EngineOptions, team: Team, setup: Setup, first: list[Prompt], all_rows: bool) -> Scale:
    """Return B, F, S and the lanes; called by the lead.

    B is at most what the KV caches hold of sequences of one block.

    Args:
        options: of the engine.
        team: with the KV tokens of every R-rank.
        setup: of the model.
        first: rows at the beginning of the job.
        all_rows: whether there are no others.
    """
    capacity = sum(partition_of(options, team).capacity([r.kv_tokens for r in team.ranks if r.has_r]))
    batch, period, steps = choose(
        options.batch, options.period, first, all_rows, 1, capacity, context=setup.max_positions
    )
    most = max([p.params.samples for p in first], default=1)  # a row is run by one lane
    batch = max(min(batch, capacity // setup.block_tokens), len(team.s_ranks))
    load = options.load_limit or load_limit(batch, period, steps, mean_prompt(first), capacity)
    shares = split(batch, len(team.s_ranks))
    lanes = options.lanes or (2 if apart(team) else 1)  # one device has nothing to overlap
    prefill = options.prefill_tokens or prefill_limit(apart(team))
    lane_batches = [split(share, max(min(lanes, share // most), 1)) for share in shares]
    return Scale(batch, period, steps, load, prefill, lane_batches)


def _describe(options: EngineOptions, model: SplitModel, tokenizer: Tokenizer) -> Setup:
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = options.kv_dtype or dtype
    shapes = list(model.attends)
    sinks = [model.sinks(i) for i in range(len(shapes))]
    return Setup(
        shapes=shapes,
        sinks=[None if s is None else s.tolist() for s in sinks],
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens_for(shapes, kv_dtype),
        max_positions=model.max_positions,
        weight_bytes=sum(f.stat().st_size for f in Path(options.model).glob("*.safetensors")),
        eos=tokenizer.eos_token_ids,
    )


def _room(options: EngineOptions, team: Team, setup: Setup, own: list[LayerShape]) -> int:
    """Return the KV tokens that this R-rank holds."""
    if team.me.kv_device == "cpu":
        return capacity_for(own, setup.kv_dtype, _kv_bytes(options, team, setup))
    from hpcdecode.attention.cuda import capacity_for as on_device

    device = torch.device(team.me.kv_device)
    nbytes = options.kv_memory or int(_free_on(device, options.gpu_memory) * _MEMORY_SHARE)
    return on_device(own, setup.kv_dtype, nbytes, device)


def _free_on(device: torch.device, limit: int | None) -> int:
    """Return the bytes of a GPU that this process may take, beside those that its S-rank holds there."""
    free = torch.cuda.mem_get_info(device)[0]
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
    weights = setup.weight_bytes * sum(r.has_s for r in here)
    return int(max(available_bytes() - weights, 0) * _MEMORY_SHARE / sum(r.has_r for r in here))


def auto_dtype(model: str, device: str = "cpu") -> str:
    """Return bfloat16 for a 16-bit checkpoint on a GPU, or a CPU that multiplies bfloat16, else float32."""
    narrow = stated_dtype(model) in ("bfloat16", "float16")
    return "bfloat16" if narrow and (device != "cpu" or multiplies_bfloat16()) else "float32"
