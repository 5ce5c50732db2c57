"""How much a lane may take on."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdecode.schedule.prefixes import MOST


def prefill_limit(apart: bool) -> int:
    """Most prompt tokens of a step, unless told. apart: whether S and R are ranks, or devices, of their own.

    Products of more tokens read the weights less often; R-ranks wait for as long as a step of prompts takes."""
    return 512 if apart else 2048


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """batch, period, steps: B, F and S of this lane. prefill_tokens: most prompt tokens in one step.
    max_positions: the model's context. prefix_tokens: most tokens of prefixes that prompts share; 0 shares none.
    schedule: a name in POLICIES. load: W_lim, tokens that its sequences attend to in a step, for load-control.
    slots: sequences and prefixes the lane may hold at once."""

    batch: int
    period: int
    steps: int
    prefill_tokens: int
    max_positions: int | None
    prefix_tokens: int = 0
    schedule: str = "fixed-f"
    load: int = 0

    @property
    def slots(self) -> int:
        return 2 * self.batch + MOST
