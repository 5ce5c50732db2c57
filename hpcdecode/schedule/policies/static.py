"""The baseline: one batch, and the next one when all its sequences have ended."""

from __future__ import annotations

from collections.abc import Collection

from hpcdecode.schedule.policies.base import Policy
from hpcdecode.schedule.sequence import Sequence


class Static(Policy):
    def room(self, now: int, in_flight: Collection[Sequence]) -> int:
        return 0 if in_flight else self.limits.batch
