"""Which schedule and admission suit rows whose K and V exceed memory, by simulated jobs of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import msgspec

from hpcdecode.engine.scale import MOST_GROWTH
from hpcdecode.engine.tier_speed import TierSpeed
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_simulator import simulate_job
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulator import lane_limits
from hpcdecode.planning.tiered import TieredMemory, job_group
from hpcdecode.schedule.auto import LOOKAHEAD, Sizes, choose
from hpcdecode.schedule.limits import LaneLimits, prefill_limit

WINS = 1.05  # times the speed of `fixed-f` with `reserve`, that others must be predicted to reach
_ROWS = 512  # that are simulated at most


class SchedulePlan(msgspec.Struct, frozen=True):
    """A schedule and an admission, and what they come to.

    Attributes:
        schedule: `fixed-f` or `fluid`.
        admission: `reserve` or `optimistic`.
        batch: B as a job chooses it.
        tokens_per_second: Of one group.
    """

    schedule: str
    admission: str
    batch: int
    tokens_per_second: float

    @property
    def flags(self) -> str:
        """Return the flags of a job that ask for it."""
        return f"--schedule {self.schedule} --admission {self.admission}"


def choose_schedule(
    memory: TieredMemory,
    cost: Cost,
    lengths: Lengths,
    lanes: int,
    r_ranks: int,
    admissions: Sequence[str],
    speeds: dict[bool, list[TierSpeed]],
    batch: int | None = None,
) -> list[SchedulePlan]:
    """Return what some of the rows reach with each schedule and admission; the first is to be taken.

    That is the fastest, but `fixed-f` and the first admission unless another is faster by WINS.

    Args:
        memory: Of an R-rank, with tiers or without.
        cost: Of a group.
        lengths: Of the rows.
        lanes: Of a group.
        r_ranks: Of a group; 0 for a rank of both roles.
        admissions: Those to look at.
        speeds: Of tiers, by whether pages move; else sequences do.
        batch: B; None to choose it as jobs do.
    """
    rows, some = len(lengths), lengths.head(_ROWS)
    found = []
    for rotates, admission in product((False, True) if memory.tiers else (False,), admissions):
        own = msgspec.structs.replace(memory, rotates=rotates)
        sizes, limits = _limits(own, some, rows, lanes, max(r_ranks, 1), admission, r_ranks > 0, batch)
        outcome = simulate_job(job_group(own, cost, limits, r_ranks, admission, speeds[rotates]), some)
        name = "fluid" if rotates else "fixed-f"
        found.append(SchedulePlan(name, admission, sizes.batch, outcome.tokens_per_second))
    plain, fastest = found[0], max(found, key=lambda plan: plan.tokens_per_second)
    first = fastest if fastest.tokens_per_second >= WINS * plain.tokens_per_second else plain
    return [first, *(plan for plan in found if plan is not first)]


def _limits(
    memory: TieredMemory,
    lengths: Lengths,
    rows: int,
    lanes: int,
    ranks: int,
    admission: str,
    crosses: bool,
    given: int | None,
) -> tuple[Sizes, list[LaneLimits]]:
    """Return B, F and S, and the limits of all lanes, as a job chooses them."""
    feed, capacity = SimulatedFeed(lengths), memory.capacity() * ranks
    first = [feed.pop() for _ in range(min(len(lengths), LOOKAHEAD))]
    sizes = choose(given, None, first, rows <= LOOKAHEAD, 1, capacity, footprint=memory.footprint)
    batch = max(min(sizes.batch, capacity // memory.block_tokens), lanes)
    optimistic = admission == "optimistic"
    grows = optimistic and given is None
    own = batch, sizes.period, sizes.steps, lanes, capacity, "fixed-f", prefill_limit(crosses)
    growth = max(min(MOST_GROWTH, LOOKAHEAD // batch), 1) if grows else 1
    limits = [replace(lane, growth=growth) for lane in lane_limits(*own, 1 if optimistic else None)]
    return Sizes(batch, sizes.period, sizes.steps), limits


def text(plans: Sequence[SchedulePlan]) -> str:
    """Return what `hpcdecode plan` says of them."""
    first, *others = plans
    said = f"schedule: {first.flags}: {first.tokens_per_second:,.0f} tokens/s of a group simulated, B {first.batch}"
    rest = "; ".join(
        f"{plan.flags} {plan.tokens_per_second / max(first.tokens_per_second, 1e-12):.2f} of that, B {plan.batch}"
        for plan in others
    )
    return f"{said}; {rest}" if rest else said
