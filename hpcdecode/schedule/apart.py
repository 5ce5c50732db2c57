"""Prompts of a lane that other ranks prefill while it decodes: what is under way, and when its sequences start.

How many lane steps a prompt takes there is not known before. A sequence that is not prefilled at the step at which it
was to start begins later, as soon as it is, if it has room then. If it has none, the lane waits for its prompt. Where
rows enter one by one, a sequence begins as soon as it is prefilled, if it has room then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.placement import Placement


class PromptsApart:
    """What a lane knows of its prompts elsewhere.

    Args:
        lane: index of the lane.
        placement: of the S-rank.

    Attributes:
        under_way: whether a step of prompts is; there is one at a time.
    """

    def __init__(self, lane: int, placement: Placement):
        self.lane, self.placement, self.under_way = lane, placement, False

    def must_wait(self, prefilling: Iterable[SequenceState | Prefix], now: int) -> bool:
        """Return whether the lane may not begin step `now` before the prompts under way are done.

        So it is if some of its sequences give up their room, or are late and have none later.
        """
        if self.under_way and self.placement.has_leaving(self.lane):
            return True
        late = _late(prefilling, now)
        return bool(late) and not self.placement.may_start(late, now + 1)

    def settle(
        self, prefilling: Iterable[SequenceState | Prefix], ready: Sequence[SequenceState], now: int, at_once: bool
    ) -> None:
        """Let sequences that are late start later; at_once: those that are prefilled earlier, if they have room."""
        self.placement.start(_late(prefilling, now), now + 1)
        early = [s for s in ready if s.start_step > now]
        if early and at_once and self.placement.may_start(early, now):
            self.placement.start(early, now)


def _late(prefilling: Iterable[SequenceState | Prefix], now: int) -> list[SequenceState]:
    """Return the sequences that are to start by step `now` and are not prefilled."""
    leaders = [s for s in prefilling if isinstance(s, SequenceState)]
    return [s for leader in leaders for s in leader.with_forks if s.start_step <= now]
