"""How much a lane may take on."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdecode.schedule.prefixes import LEAST_PREFIXES
from hpcdecode.schedule.spread import UNKNOWN, Spread


def prefill_limit(apart: bool) -> int:
    """Return the default for the most prompt tokens of a step.

    GEMMs over more tokens read the weights less often. R-ranks wait for as long as a step of prompts takes.

    Args:
        apart: whether S and R are ranks, or devices, of their own.
    """
    return 512 if apart else 2048


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """What bounds a lane.

    Attributes:
        batch: B of this lane, sequences at once.
        period: F, steps from micro-batch to micro-batch.
        steps: S, steps in which a sequence decodes at most.
        prefill_tokens: the most prompt tokens in one step.
        max_positions: the model's context; None if it has no limit.
        prefix_tokens: the most tokens of prefixes that prompts share; 0 shares none.
        schedule: a name in `policies.POLICIES`.
        load: W_lim, tokens that the sequences attend to in a step, for the schedule `load-control`.
        growth: to how many times B the lane may grow if sequences end early.
        least_period: to which F may shrink with it; None for F itself.
        least_prefixes: the most prefixes at once of a lane that is small.
        keeps_prefixes: whether those that nothing uses are held while there is room.
        apart: whether other ranks prefill its prompts while it decodes.
        spread: how many rows share prefixes.
        prefix_room: KV tokens, of all R-ranks, that prefixes may take and lie on more of them than they must.
    """

    batch: int
    period: int
    steps: int
    prefill_tokens: int
    max_positions: int | None
    prefix_tokens: int = 0
    schedule: str = "fixed-f"
    load: int = 0
    growth: int = 1
    least_period: int | None = None
    least_prefixes: int = LEAST_PREFIXES
    keeps_prefixes: bool = False
    apart: bool = False
    spread: Spread = UNKNOWN
    prefix_room: int = 0

    @property
    def most(self) -> int:
        """Return the greatest B that the lane may have."""
        return self.batch * self.growth

    @property
    def prefixes(self) -> int:
        """Return the most prefixes at once: two sequences have one at least."""
        return max(self.least_prefixes, self.most // 2)

    @property
    def slots(self) -> int:
        """Return how many sequences and prefixes the lane may hold at once."""
        return 2 * self.most + self.prefixes
