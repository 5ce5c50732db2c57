"""The schedule of a job with tiers that is about to begin, by its profile: what `hpcdecode plan --kv-swap` chooses."""

from __future__ import annotations

import logging
from itertools import islice

import msgspec

from hpcdecode.attention.shapes import recurrent_shapes
from hpcdecode.config import Job
from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.files import resolve
from hpcdecode.data.prompts.opening import is_once
from hpcdecode.data.prompts.row_template import row_template
from hpcdecode.data.prompts.rows import read_rows
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.setup import apart, together
from hpcdecode.engine.swap_room import obstacle
from hpcdecode.errors import UserError
from hpcdecode.planning import lengths
from hpcdecode.planning.auto import capacities
from hpcdecode.planning.profile import Profile, read
from hpcdecode.planning.schedule_choice import choose_schedule, text
from hpcdecode.planning.tiered import TieredMemory
from hpcdecode.ranks.team import Team
from hpcdecode.ranks.wishes import GroupShape
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import LOOKAHEAD, new_tokens, usual_lanes

_PLAIN = "fixed-f"
_NO_LIMIT = 1 << 40  # tokens
logger = logging.getLogger(__name__)


def with_schedule(job: Job, team: Team) -> Job:
    """Return a job with the schedule that its profile predicts to be the fastest, if it is to be chosen.

    Every rank calls this. The lead simulates some rows, and logs what the schedules reach.

    Args:
        job: Without a schedule of its own if `choose_schedule` is set; then it has tiers and a profile.
        team: The ranks, with their roles.

    Raises:
        UserError: On every rank, if the profile, the prompts or a tier cannot be used.
    """
    if not job.choose_schedule:
        return job
    found = together(team, lambda: _choice(job, team) if team.lead else None)
    schedule, said = team.broadcast(found, tuple[str, str])
    uses_tiers = schedule == "fluid" or job.admission == "optimistic"
    if team.lead:
        logger.info(said + ("" if uses_tiers else "; --kv-swap is not used"))
    kept = job.kv_swap if uses_tiers else ()
    return msgspec.structs.replace(job, schedule=schedule, choose_schedule=False, kv_swap=kept)


def _choice(job: Job, team: Team) -> tuple[str, str]:
    """Return a schedule, and what to say of it and of others."""
    profile = read(job.profile or "")
    if why := _obstacle(job, profile, team):
        return _PLAIN, f"schedule: {_PLAIN}, as {why}"
    rows = _lengths(job, len(team.groups))
    if rows is None:
        return _PLAIN, f"schedule: {_PLAIN}, as there are no rows that can be used"
    group, pool = team.groups[0], team.groups[0].pools[0]
    cost = profile.alone if group.alone and profile.alone else profile.cost
    split, replica = capacities(job, profile, team, GroupShape(1, 1))
    nbytes = job.kv_memory or int((replica if group.alone else split) * profile.unit(1).token_bytes)
    cores = team.ranks[pool[0]].threads
    memory = TieredMemory(profile.shapes, profile.kv_dtype, nbytes, job.swap_tiers, False, cores, here=True)
    try:
        memory.sizes  # noqa: B018  # raises
    except UserError as error:
        return _PLAIN, f"schedule: {_PLAIN}, as the other cannot be: {error}"
    speeds = {rotates: msgspec.structs.replace(memory, rotates=rotates).speeds() for rotates in (False, True)}
    lanes = job.lanes or usual_lanes(1, 1, apart(team, group))
    own = rows.part(0, len(team.groups))
    ranks = 0 if group.alone else len(pool)
    plans = choose_schedule(memory, cost, own, lanes, ranks, (job.admission,), speeds, job.batch)
    return plans[0].schedule, text(plans)


def _obstacle(job: Job, profile: Profile, team: Team) -> str:
    """Return why no other schedule can be looked at, or nothing."""
    if not profile.shapes:
        return f"--profile {job.profile} does not say the shapes of layers: calibrate again"
    if any(map(is_once, resolve(job.prompts))):
        return "prompts from standard input can be read only once"
    if sum(group.pools == team.groups[0].pools for group in team.groups) > 1:
        return "R-ranks serve several S-ranks; --pools own would give each its own"
    if why := obstacle(team, bool(recurrent_shapes(profile.shapes))):
        return f"pages do not move {why}"
    if any(rank.has_r and rank.kv_device != "cpu" for rank in team.ranks):
        return "what pages cost on GPUs is not measured; --schedule fluid asks for them"
    return ""


def _lengths(job: Job, groups: int) -> lengths.Lengths | None:
    """Return the lengths of the first rows, which are taken to run to their max_tokens; None if there are none."""
    rows = read_rows(
        resolve(job.prompts),
        job.params,
        column=job.prompt_column,
        model=job.model,
        limit=job.limit,
        wanted=job.shard.holds if job.shard else None,
        template=row_template(job),
        quiet=True,  # the rows are read again
        adapters=tuple(job.adapters),
    )
    some = tokenized(
        islice(rows, 2 * LOOKAHEAD * groups), Tokenizer.load(job.model, skip=job.skip_tokenizer_init), _NO_LIMIT
    )
    found = [(len(p.token_ids), new_tokens(p, _NO_LIMIT)) for p in some if isinstance(p, Prompt)]
    return lengths.of(*zip(*found, strict=True)) if found else None
