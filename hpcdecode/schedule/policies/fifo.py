"""Continuous batching (Orca; Lamina's default): a request enters as soon as there is headroom for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.policies.base import Policy


class Fifo(Policy):
    """Admits what is prefilled in one step, or one request: its sequences then decode from the next step on."""

    def __init__(self, limits: LaneLimits):
        super().__init__(limits)
        self._now = 0

    def headroom(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Return what is missing to B."""
        self._now = now
        return super().headroom(now, in_flight)

    def allows(self, group: Sequence[SequenceState]) -> bool:
        """Return whether the prompts fit into a step, after one for what they share."""
        shares = any(s.prefix is not None and s.prefix.prefilled < s.prefix.prompt_length for s in group)
        alone = len(group) == len(group[0].with_forks)
        return alone or group[0].start_step <= self._now + 1 + shares
