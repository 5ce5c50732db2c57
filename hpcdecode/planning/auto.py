"""Layout, B, F and lanes of a job that is about to begin, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

import msgspec

from hpcdecode.attention.shapes import recurrent_shapes, state_dtype_of
from hpcdecode.config import EngineOptions, Job
from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.files import resolve
from hpcdecode.data.prompts.opening import is_once
from hpcdecode.data.prompts.order import in_order
from hpcdecode.data.prompts.row_template import row_template
from hpcdecode.data.prompts.rows import read_rows
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.room import kv_share
from hpcdecode.engine.setup import together
from hpcdecode.errors import UserError
from hpcdecode.planning import layout_planner, layouts
from hpcdecode.planning.layer_work import without_indexers
from hpcdecode.planning.plan_text import chosen
from hpcdecode.planning.planner import BATCHES, MeanRows
from hpcdecode.planning.profile import Profile, read
from hpcdecode.ranks.fit import copies_of
from hpcdecode.ranks.layout import against_replicas
from hpcdecode.ranks.team import Team
from hpcdecode.ranks.wishes import GroupShape, Wishes
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import LOOKAHEAD, mean_prompt, new_tokens
from hpcdecode.schedule.spread import shared_by_pairs

_MOST_COUNTED = 4096  # rows
_NO_LIMIT = 1 << 40  # tokens


def advise(job: Job, wishes: Wishes, team: Team) -> tuple[Wishes, str]:
    """Return the layout that the job's profile predicts to be the fastest; every rank calls this.

    Args:
        job: With a profile.
        wishes: What is asked of the layout.
        team: The ranks, with the roles that they have without a profile.

    Returns:
        What to ask for, and what it reaches and others would reach, to follow the layout's own line.

    Raises:
        UserError: On every rank, if the profile or the prompts cannot be used.
    """
    found = together(team, lambda: _advice(job, wishes, team) if team.lead else None)
    return team.broadcast(found, tuple[Wishes, str])


def _advice(job: Job, wishes: Wishes, team: Team) -> tuple[Wishes, str]:
    profile = read(job.profile or "")
    _require_ranks(job, profile, team)
    if any(rank.gpus for rank in team.ranks) and (job.device, job.r_device) != ("cpu", "cpu"):
        raise UserError(
            f"--profile {job.profile}: was measured on CPUs, as all profiles are; this job has ranks that see a GPU: "
            "leave --profile out, or give --device cpu --r-device cpu"
        )
    given = wishes.s_ranks is not None or wishes.layout == "replicas" or wishes.pp > 1 or wishes.prefill_ranks
    if len(team.ranks) == 1 or given:
        return wishes, ""
    possible = _possible(job, wishes, profile, team)
    if not possible:
        return wishes, ""
    rows = _mean_rows(job, len(team.ranks))
    if rows is None:
        return wishes, ": by the rule, as prompts from standard input can be read only once"
    plans = layout_planner.choose_layout(possible, rows, _wanted(job))
    if not plans:
        return wishes, ": by the rule, as KV memory is too small for a batch that the planner knows"
    best = plans[0].layout
    wishes = msgspec.structs.replace(wishes, tp=best.shape.tp if best.shape.tp > 1 else wishes.tp)
    if best.parts[0].r_ranks:
        wishes = msgspec.structs.replace(wishes, layout="split", s_ranks=best.s_ranks)
    else:
        wishes = msgspec.structs.replace(wishes, layout="replicas")
    return wishes, f": {chosen(plans)}"


def _possible(job: Job, wishes: Wishes, profile: Profile, team: Team) -> list[layouts.PossibleLayout]:
    """Return the layouts that are asked for, that the ranks could have and that the profile speaks of."""
    shapes = [GroupShape(tp, 1) for tp in profile.tensor_parallel if wishes.tp in (None, tp)]
    fitting = [s for s in shapes if wishes.layout != "split" and against_replicas(team.ranks, s.size) is None]
    if fitting and profile.alone is None:
        raise UserError(
            f"--profile {job.profile}: has no costs of replicas, so it cannot say whether a split is faster: calibrate "
            "again, or give --layout"
        )
    if not profile.token_bytes:
        return []
    found: list[layouts.PossibleLayout] = []
    for shape in shapes:
        alone = profile.of_member(profile.alone, shape.tp) if profile.alone and shape in fitting else None
        unit = profile.unit(shape.tp)
        ranks = layouts.RanksAlike("", len(team.ranks), alone, *capacities(job, profile, team, shape), shape, unit)
        found += layouts.layouts_of_like(ranks, profile.of_member(profile.cost, shape.tp), (wishes.pools,))
    return found


def capacities(job: Job, profile: Profile, team: Team, shape: GroupShape) -> tuple[int, int]:
    """Return about how many KV tokens a rank will have beside one S-rank of its host, and as a replica.

    A rank has the heads of its member of each token.
    """
    unit = profile.unit(shape.tp)
    if job.kv_memory is not None:
        return (unit.capacity(job.kv_memory),) * 2
    found = []
    for host in {rank.host for rank in team.ranks}:
        here = [rank for rank in team.ranks if rank.host == host]
        memory, weights = min(rank.memory for rank in here), max(rank.weights for rank in team.ranks)
        count, replicas = len(here), int(copies_of(here, shape.size) * weights)
        sizes = kv_share(memory, weights, max(count - 1, 1)), kv_share(memory, replicas, count)
        found.append([unit.capacity(size) for size in sizes])
    split, beside = map(min, zip(*found, strict=True))
    return split, beside


def _mean_rows(job: Job, ranks: int) -> MeanRows | None:
    """Return the means of the first rows, and their number if it is small; None if they can be read only once."""
    files = resolve(job.prompts)
    if any(map(is_once, files)):
        return None
    wanted = job.shard.holds if job.shard else None
    rows = read_rows(
        files,
        job.params,
        column=job.prompt_column,
        model=job.model,
        limit=job.limit,
        wanted=wanted,
        template=row_template(job),
        quiet=True,  # the rows are read again
        adapters=tuple(job.adapters),
    )
    most = min(LOOKAHEAD * ranks, _MOST_COUNTED)
    seen = list(islice(rows, most))
    tokenizer = Tokenizer.load(job.model, skip=job.skip_tokenizer_init)
    ordered = in_order(seen[:LOOKAHEAD], None) if job.prefix_sharing else seen[:LOOKAHEAD]
    first = [p for p in tokenized(ordered, tokenizer, _NO_LIMIT) if isinstance(p, Prompt)]
    if not first:
        return MeanRows(1, 1, 1)
    return _means(first, _NO_LIMIT, job.prefix_sharing, len(seen) if len(seen) < most else None)


def _means(first: Sequence[Prompt], longest: int, shares: bool, count: int | None = None) -> MeanRows:
    steps = max(fmean(new_tokens(p, longest) for p in first) - 1, 1.0)
    shared = sum(shared_by_pairs(first)) / sum(p.sequences for p in first) if shares else 0.0
    return MeanRows(mean_prompt(first), steps, count, shared=shared)


def _wanted(options: EngineOptions) -> layout_planner.GroupWishes:
    """Return what the flags ask of every group."""
    batches = (options.batch,) if options.batch else BATCHES
    return layout_planner.GroupWishes(batches=batches, lanes=(options.lanes,) if options.lanes else None)


def profile_for(path: str, engine: Engine) -> Profile:
    """Read a profile for an engine's job.

    Raises:
        UserError: If it was not measured with the engine's model, data types and ranks.
    """
    profile, setup, team = read(path), engine.setup, engine.team
    keeps_states = bool(recurrent_shapes(setup.shapes))
    states = [(profile.state_dtype, state_dtype_of(setup.shapes))] * keeps_states
    kinds = [(profile.dtype, setup.dtype), (profile.kv_dtype, setup.kv_dtype), *states]
    counts = (profile.cost.layers, len(setup.shapes)), (profile.ranks, len(team.ranks))
    measured, here = zip(counts[0], *kinds, counts[1], strict=True)
    if measured != here:
        names = ["{} layers", "{}", "KV {}", *["states {}"] * keeps_states, "{} ranks"]
        said, expected = (" ".join(map(str.format, names, values)) for values in (here, measured))
        raise UserError(
            f"--profile {path}: was measured with {expected}; this job has {said}: calibrate as it will run"
        )
    whole = team.groups[0].tp == 1  # else shapes are those of a member
    if whole and profile.shapes and without_indexers(profile.shapes) != without_indexers(setup.shapes):
        raise UserError(
            f"--profile {path}: was measured with another model, {profile.model}, whose layers have other shapes than "
            f"those of {engine.options.model}: calibrate as it will run"
        )
    if team.groups[0].alone and profile.alone is None:
        raise UserError(f"--profile {path}: has no costs of replicas: calibrate again, or give --layout split")
    return profile


def _require_ranks(job: Job, profile: Profile, team: Team) -> None:
    if profile.ranks != len(team.ranks):
        raise UserError(
            f"--profile {job.profile}: was measured with {profile.ranks} ranks; this job has {len(team.ranks)} ranks: "
            "calibrate as it will run"
        )


def planned(profile: Profile, engine: Engine, first: Sequence[Prompt], all_rows: bool) -> EngineOptions:
    """Return the engine's options, with the planner's choice for those that are not given.

    Nothing is chosen if the first rows are all rows: such a job starts all of them at once if they fit.

    Args:
        profile: Of the engine's ranks.
        engine: With its KV caches.
        first: The first rows.
        all_rows: Whether these are all rows.
    """
    options, team = engine.options, engine.team
    if all_rows or not first:
        return options
    capacity = min(r.kv_tokens for r in team.ranks if r.has_r)
    rows = _means(first, min(capacity, engine.max_positions), options.prefix_sharing)
    layout = _layout_of(team, profile, capacity)
    plan = None if layout is None else layout_planner.planned_layout(layout, rows, _wanted(options))
    if plan is None:
        return options
    group = min(plan.groups, key=lambda group: group.batch)
    return msgspec.structs.replace(
        options,
        batch=options.batch or max(group.batch, *(p.params.samples for p in first)),
        period=options.period or group.rows.period,
        lanes=options.lanes or group.lanes,
    )


def _layout_of(team: Team, profile: Profile, capacity: int) -> layouts.PossibleLayout | None:
    """Return the layout that a team has, at a profile's costs, or None if the profile does not speak of it."""
    group = team.groups[0]
    shape = GroupShape(group.tp, len(group.stages))
    if shape.pp > 1 or shape.tp not in profile.tensor_parallel:
        return None
    count, unit = len(team.groups) * shape.size, profile.unit(shape.tp)
    if group.alone:
        assert profile.alone is not None, "replicas have costs"
        alone = profile.of_member(profile.alone, shape.tp)
        return layouts.replicas(layouts.RanksAlike("", count, alone, capacity, capacity, shape, unit))
    pools = "own" if any(rank.serves is not None for rank in team.ranks) else "shared"
    cost = profile.of_member(profile.cost, shape.tp)
    return layouts.split(cost, capacity, count, len(team.r_ranks), pools, shape, unit)
