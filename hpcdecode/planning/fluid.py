"""What rotation of groups costs, and when it wins (`--schedule fluid`).

B sequences of C cached tokens each are in flight. Memory has room for M tokens, and tiers bring v tokens a second.
Every step attends to all, M of them where they lie; the rest comes in meanwhile:

    T_step = max(T(B) + R * B * C, (B * C - M) / v)

Without rotation B_0 = M / C sequences are in flight, and T_0 = T(B_0) + R * M. Rotation wins if B / T_step > B_0 / T_0:
if T(B) grows far less than B does (weights that take longer to read than to compute with), contexts are short, and the
tier is fast. FluidInfer (Xiao), section 4.1, adds up what waits; here a part of K and V stays in memory, as in every
step the sequence attended to last is needed last.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hpcdecode.engine.engine import Engine
from hpcdecode.engine.fluid import GroupRotation, rotation_of
from hpcdecode.engine.scale import Scale
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.profile import Profile
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import mean_prompt

logger = logging.getLogger(__name__)


def step_seconds(rotation: GroupRotation, cost: Cost, batch: int, context: float, r_ranks: int = 1) -> float:
    """Return T_step.

    Args:
        rotation: M and v.
        cost: T(B) and R.
        batch: B.
        context: C.
        r_ranks: R-ranks, over which sequences are spread.
    """
    return max(_in_memory(cost, batch, context, r_ranks), rotation.least_step_seconds(batch * context))


def gain(rotation: GroupRotation, cost: Cost, batch: int, context: float, r_ranks: int = 1) -> float:
    """Return the tokens a second with rotation, over those of as many sequences as memory has room for."""
    alone = max(min(int(rotation.resident / context), batch), 1)
    without = alone / _in_memory(cost, alone, context, r_ranks)
    return batch / step_seconds(rotation, cost, batch, context, r_ranks) / without


def foresee(profile: Profile, engine: Engine, scale: Scale, first: Sequence[Prompt]) -> None:
    """Log what a profile predicts of a job's rotation, if it has any; a warning if it loses.

    Args:
        profile: Of the engine's ranks.
        engine: With its KV caches.
        scale: Of its first group.
        first: The first rows.
    """
    rotation = rotation_of(engine.team)
    if rotation is None or not first:
        return
    group = engine.team.group
    cost = profile.alone if group.alone and profile.alone else profile.cost
    context = mean_prompt(first) + scale.steps / 2
    seconds, times = (of(rotation, cost, scale.batch, context, len(group.pools[0])) for of in (step_seconds, gain))
    said = f"rotation of groups: {scale.batch} rows of {context:,.0f} tokens take {seconds:.2g} s a step by the profile"
    advice = "" if times >= 1 else "; leave out --schedule fluid"
    logger.log(
        logging.INFO if times >= 1 else logging.WARNING,
        f"{said}, {times:.2f} times the tokens/s of what fits in memory{advice}",
    )


def _in_memory(cost: Cost, batch: int, context: float, r_ranks: int) -> float:
    """Return the seconds of a step whose K and V lie in memory."""
    attend = float(cost.attention_seconds(context, 1))
    steps = cost.body_seconds(batch) + cost.logits_seconds(batch) + cost.attend_seconds_per_step
    return steps + attend * batch / r_ranks + cost.wire_seconds_per_token * batch
