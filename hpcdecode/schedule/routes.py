"""The route of a lane: which copy of the model in a group runs each of its slices.

It is the same at every step, so that what a copy holds of prompts stays where it is.
"""

from __future__ import annotations

from typing import NamedTuple


class Rotation(NamedTuple):
    """Rotational staggered pipelining (Lamina, section 5.3): the lanes go from copy to copy, slice by slice.

    While the attention of a lane runs, its next slice waits on another copy, and this copy runs a slice of the lane
    behind. The last slice, which ends with the logits, is on copy 0, where all lanes are scheduled and sampled.

    Attributes:
        copies: K, copies of the model; 1 for the fixed route.
        layers: L, attention layers. Slices are numbered 0 to L.
    """

    copies: int
    layers: int

    def copy(self, lane: int, number: int) -> int:
        """Return the copy that runs slice `number` of a lane of the group: (lane + number) mod K, the last one's 0."""
        return (lane + number) % self.copies if number < self.layers else 0

    def visits(self, lane: int, copy: int) -> list[int]:
        """Return the slices of a lane that a copy runs, in order."""
        return [number for number in range(self.layers + 1) if self.copy(lane, number) == copy]
