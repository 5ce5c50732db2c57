"""Optimistic placement that preempts far more often than lengths give reason to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from hpcdecode.engine import scale
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.optimistic import OptimisticPlacement, may_leave


class HastyPlacement(OptimisticPlacement):
    """Expects every sequence to end with its next token, and has one leave at random steps.

    Attributes:
        rate: share of the steps in which one has to leave that there is room for.
        chosen: how many had to leave, of all placements.
    """

    rate = 0.0
    chosen = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._draw = np.random.default_rng(0)
        self.lengths.stops = 1
        self.lengths.going = lambda generated, later: (later <= generated) * 1.0

    def _estimate(self):
        pass

    def grow(self, lane, now):
        super().grow(lane, now)
        if self._draw.random() < self.rate:
            rank = int(self._draw.integers(len(self.capacity)))
            held = self._claims[rank].items()
            if any(isinstance(s, SequenceState) and not c.leaves and may_leave(s) for s, c in held):
                self._have_leave(rank)

    def _have_leave(self, rank):
        super()._have_leave(rank)
        HastyPlacement.chosen += 1


def hasty_placement(rate: float) -> type[HastyPlacement]:
    """Return the placement that has sequences leave in this share of the steps."""
    return type("Placement", (HastyPlacement,), {"rate": rate})


@contextmanager
def hasty(rate: float) -> Iterator[None]:
    """Let engines place hastily under optimistic admission."""
    with patch.object(HastyPlacement, "rate", rate), patch.object(scale, "placement_kind", lambda _: HastyPlacement):
        yield
