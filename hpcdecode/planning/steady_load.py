"""What lanes in their steady state hold: so many sequences of one length, each a token a step."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.system.timeline import Timeline

OperationSeconds = dict[str, float]  # seconds of a step by operation of the timeline


@dataclass(frozen=True)
class SteadyLoad:
    """Sequences in their steady state, and prompts that are prefilled meanwhile.

    Attributes:
        batch: Sequences of all lanes.
        lanes: Number of lanes.
        context: Tokens of every sequence before the first step.
        steps: Steps that are measured.
        pieces: Pieces of an R-rank's work in a layer.
        messages: Send activations as between hosts, not through shared memory.
        prompt: Tokens of each prompt that every lane prefills, one after the other; 0 for none.
        chunk: Prompt tokens of a lane's step.
        paged: Keep K and V as rotation of groups does, with all pages in memory; decode steps go layer by layer then.
    """

    batch: int
    lanes: int
    context: int
    steps: int
    pieces: int = 1
    messages: bool = False
    prompt: int = 0
    chunk: int = 0
    paged: bool = False

    @property
    def lane_batch(self) -> int:
        """Return the sequences of a lane."""
        return self.batch // self.lanes

    @property
    def prompts(self) -> int:
        """Return the number of prompts of a lane; the last one is complete in the last step."""
        return (self.steps + 1) * self.chunk // self.prompt if self.prompt else 0

    @property
    def limits(self) -> LaneLimits:
        """Return the limits of a lane: its sequences, and one prompt after the other."""
        return LaneLimits(self.lane_batch + 1, 1, self.steps + 1, max(self.chunk, 1), None, schedule="fifo")

    @property
    def attended_tokens(self) -> float:
        """Return the tokens that a sequence attends to in the mean step."""
        return self.context + 1 + (self.steps + 1) / 2

    @property
    def pairs(self) -> float:
        """Return the pairs of query and key of prompts in a lane's mean step."""
        return self.chunk * (self.prompt + 1) / 2


def seconds_since(before: OperationSeconds, timeline: Timeline, steps: int) -> OperationSeconds:
    """Return the seconds of a step by operation, of so many steps since the timeline's shares were `before`."""
    return {o: (s - before.get(o, 0.0)) / steps for o, s in timeline.shares().items()}
