"""B, F and lanes of a job that is about to begin, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from hpcdecode.config import EngineOptions
from hpcdecode.engine.engine import Engine
from hpcdecode.errors import UserError
from hpcdecode.planning import planner
from hpcdecode.planning.profile import Profile, read
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import mean_prompt, new_tokens


def profile_for(path: str, engine: Engine) -> Profile:
    """Read a profile for an engine's job.

    Raises:
        UserError: If it was not measured with the engine's model, data types and number of ranks.
    """
    profile, setup = read(path), engine.setup
    measured = (profile.cost.layers, profile.dtype, profile.kv_dtype, 1, profile.ranks)
    here = (len(setup.shapes), setup.dtype, setup.kv_dtype, len(engine.team.s_ranks), len(engine.team.ranks))
    if measured != here:
        names = ("{} layers", "{}", "KV {}", "{} S-rank of", "{} ranks")
        said, expected = (" ".join(map(str.format, names, values)) for values in (here, measured))
        raise UserError(
            f"--profile {path}: was measured with {expected}; this job has {said}: calibrate as it will run"
        )
    return profile


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
    longest = min(capacity, engine.max_positions)
    rows = planner.MeanRows(mean_prompt(first), max(fmean(new_tokens(p, longest) for p in first) - 1, 1.0))
    choice = planner.choice(capacity, profile.ranks - 1, measured=True)
    plan = planner.choose(profile.cost, rows, choice)
    return msgspec.structs.replace(
        options,
        batch=options.batch or max(plan.batch, *(p.params.samples for p in first)),
        period=options.period or plan.rows.period,
        lanes=options.lanes or plan.lanes,
    )
