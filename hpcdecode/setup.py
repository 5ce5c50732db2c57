"""The stages before the work, collective over the team: load the model, measure the room, choose B, F and lanes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from hpcdecode.attention import LayerShape, block_tokens_for, bytes_per_token, capacity_for, isa
from hpcdecode.data.identity import identity
from hpcdecode.data.inputs import resolve
from hpcdecode.data.resume import Earlier, find_earlier
from hpcdecode.data.tokens import Prompt, Tokenizer
from hpcdecode.errors import UserError
from hpcdecode.job import STDIN, Job
from hpcdecode.launch import Rank, Team
from hpcdecode.memory import available_bytes
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.config import read_config
from hpcdecode.schedule.auto import choose
from hpcdecode.schedule.microbatch import Limits

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
    """The size of the job. batch, period, steps: B, F and S; lane_batches: B of every lane, by S-rank."""

    batch: int
    period: int
    steps: int
    lane_batches: list[list[int]]

    @property
    def slots(self) -> int:
        """Sequences that any lane may hold at once."""
        return max(Limits(b, 1, 1, 1, None).slots for lanes in self.lane_batches for b in lanes)

    @property
    def lanes(self) -> int:
        """Lanes of all S-ranks."""
        return sum(map(len, self.lane_batches))


class Begin(msgspec.Struct, frozen=True):
    """Where the lead begins. identity: all that the tokens depend on; earlier: the run to continue, if there is one."""

    files: list[str]
    identity: dict[str, Any]
    earlier: Earlier | None


def survey(job: Job, team: Team) -> Begin | None:
    """Look at prompts, model and output before anything is loaded; None on all but the lead.

    The lead's UserError is raised on every rank.
    """

    def look() -> Begin:
        files = resolve(job.prompts)
        _require_apart(job.output, files)
        dtype = job.dtype or _auto_dtype(job.model)
        what = identity(job, files, dtype, job.kv_dtype or dtype)
        return Begin(files, what, find_earlier(job.output, what, overwrite=job.overwrite))

    return _together(team, lambda: look() if team.lead else None)


def load(job: Job, team: Team, model: SplitModel | None = None) -> tuple[Setup, SplitModel | None, Tokenizer | None]:
    """Load the model and its tokenizer on the S-ranks.

    model: one loaded before. Any rank's UserError is raised on every rank.
    """

    def own() -> tuple[Setup | None, SplitModel | None, Tokenizer | None]:
        if not team.me.has_s:
            return None, None, None
        tokenizer = Tokenizer.load(job.model)
        loaded = model or load_split(job.model, dtype=job.dtype or _auto_dtype(job.model))
        return _describe(job, loaded, tokenizer) if team.lead else None, loaded, tokenizer

    setup, loaded, tokenizer = _together(team, own)
    return team.broadcast(setup, Setup), loaded, tokenizer


def _together(team: Team, action: Callable[[], T]) -> T:
    """What `action` returns on this rank; the UserError of any rank is raised on every rank."""
    result, problem = None, ""
    try:
        result = action()
    except UserError as error:
        problem = str(error)
    problems = [p for p in team.gather_all(problem, str) if p]
    if problems:
        raise UserError(problems[0], everywhere=True)
    return result


def measure_room(job: Job, team: Team, setup: Setup) -> None:
    """Settle how many KV tokens each R-rank holds, and let everybody know."""
    me = team.me
    if me.has_r:
        me.isa = isa()
        me.kv_tokens = capacity_for(setup.shapes, setup.kv_dtype, _kv_bytes(job, team, setup))
    team.ranks[:] = team.gather_all(me, Rank)
    for rank in team.ranks:
        if rank.has_r and rank.kv_tokens < 1:
            raise UserError(
                f"rank {rank.rank} on {rank.host} has no room for a KV cache: this model needs "
                f"{bytes_per_token(setup.shapes, setup.kv_dtype):,.0f} bytes a token, in blocks of "
                f"{setup.block_tokens} tokens; raise --kv-memory, or give the rank more memory",
                everywhere=True,
            )


def choose_scale(job: Job, team: Team, first: list[Prompt], all_rows: bool) -> Scale:
    """B, F, S and the lanes; called by the lead. first: the job's first rows, `all_rows` if it has no others."""
    capacity = sum(r.kv_tokens for r in team.ranks)
    batch, period, steps = choose(job.batch, job.period, first, all_rows, job.params.max_tokens, capacity)
    most = max([p.params.samples for p in first], default=1)  # a row is run by one lane
    batch = max(batch, len(team.s_ranks))
    shares = _split(batch, len(team.s_ranks))
    lanes = job.lanes or (1 if team.comm is None else 2)  # one process has nothing to overlap
    return Scale(batch, period, steps, [_split(share, max(min(lanes, share // most), 1)) for share in shares])


def _describe(job: Job, model: SplitModel, tokenizer: Tokenizer) -> Setup:
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = job.kv_dtype or dtype
    shapes = list(model.attends)
    sinks = [model.sinks(i) for i in range(len(shapes))]
    return Setup(
        shapes=shapes,
        sinks=[None if s is None else s.tolist() for s in sinks],
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens_for(shapes, kv_dtype),
        max_positions=model.max_positions,
        weight_bytes=sum(f.stat().st_size for f in Path(job.model).glob("*.safetensors")),
        eos=tokenizer.eos_token_ids,
    )


def _kv_bytes(job: Job, team: Team, setup: Setup) -> int:
    if job.kv_memory is not None:
        return job.kv_memory
    here = [r for r in team.ranks if r.host == team.me.host]
    weights = setup.weight_bytes * sum(r.has_s for r in here)
    return int(max(available_bytes() - weights, 0) * _MEMORY_SHARE / sum(r.has_r for r in here))


def _auto_dtype(model: str) -> str:
    """bfloat16 for a 16-bit checkpoint on a CPU that multiplies bfloat16, else float32."""
    narrow = read_config(model).dtype in (torch.bfloat16, torch.float16)
    return "bfloat16" if narrow and "bf16" in isa() else "float32"


def _require_apart(output: str, files: list[str]) -> None:
    if any(os.path.realpath(path) == os.path.realpath(output) for path in files if path != STDIN):
        raise UserError(f"results {output}: expected a file that is no prompt file; choose another -o")


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]
