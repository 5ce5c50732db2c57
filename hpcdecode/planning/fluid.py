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

from hpcdecode.engine.fluid import GroupRotation
from hpcdecode.planning.cost import Cost


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


def _in_memory(cost: Cost, batch: int, context: float, r_ranks: int) -> float:
    """Return the seconds of a step whose K and V lie in memory."""
    attend = cost.attend_seconds_per_cached_token * context + cost.attend_seconds_per_sequence
    steps = cost.body_seconds(batch) + cost.logits_seconds(batch) + cost.attend_seconds_per_step
    return steps + attend * batch / r_ranks + cost.wire_seconds_per_token * batch
