"""What a job that is about to begin takes from a profile: B, F and lanes where they are not given."""

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
    """UserError where it was not measured with the engine's model, data types and number of ranks."""
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
    """The engine's options with what the planner chooses for the first rows. A job of no more than these starts all at
    once where they fit, so nothing is chosen for it."""
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
