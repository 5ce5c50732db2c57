"""The baseline: one batch, and the next one when all its sequences have ended."""

from __future__ import annotations

from collections.abc import Collection

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.policies.base import Policy


class Static(Policy):
    """Admits B sequences to an empty lane."""

    def headroom(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Return B if nothing is in flight, else 0."""
        return 0 if in_flight else self.batch
