"""Faults that the differential test must find, put into the running program by name while a job runs in company.

The rows alone run without them, or both would be wrong alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
from torch import Tensor

from hpcdecode.attention.base import DEFAULT_BLOCK_TOKENS
from hpcdecode.data.results.earlier import EarlierRun
from hpcdecode.engine.inputs import Inputs
from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import Request
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.slots import Slots
from hpcdecode.schedule.speculation import Speculation


def inputs() -> AbstractContextManager:
    """Take rows of logits as they are if there are as many as sampled sequences; the check that sees it is off."""

    def drawn(self: Inputs, rows: Tensor) -> Tensor:
        same = self._sample_indices is None or len(self._sample_indices) == len(rows)
        return rows if same else rows[self._sample_indices.to(rows.device)]

    return patch.multiple(Inputs, select=drawn, _check_sample_indices=lambda self, *_: None)


def scheduler() -> AbstractContextManager:
    """Let beams fork from the slot of the likeliest one, whichever beam they go on from."""
    follow = Slots.follow

    def followed(self: Slots, request: Request, parents: list[int]) -> None:
        before = len(self._forks)
        first = request.sequences[0].slot
        follow(self, request, parents)
        self._forks[before:] = [(rank, first, new) for rank, _, new in self._forks[before:]]

    return patch.object(Slots, "follow", followed)


def placement() -> AbstractContextManager:
    """Forget what an R-rank holds already when asking whether more fits."""
    return patch.object(Placement, "fits", lambda self, rank, extra: self.tokens(extra) <= self.capacity[rank])


def prefixes() -> AbstractContextManager:
    """Let prompts share a prefix whose last block may be another one than theirs."""

    def begins(self: Prefix, ids: np.ndarray, adapter: int) -> bool:
        compared = self.prompt_length - DEFAULT_BLOCK_TOKENS
        return (
            adapter == self.adapter
            and self.prompt_length < len(ids)
            and np.array_equal(ids[:compared], self.input_ids[:compared])
        )

    return patch.object(Prefix, "begins", begins)


def adapters() -> AbstractContextManager:
    """Let prompts share a prefix whichever adapter it was prefilled with."""
    begins = Prefix.begins
    return patch.object(Prefix, "begins", lambda self, ids, _: begins(self, ids, self.adapter))


def resume() -> AbstractContextManager:
    """Take the row after a finished one for finished too."""
    done = EarlierRun.done
    skips = lambda self, line: done(self, line) or (line % 5 == 0 and done(self, line - 1))  # noqa: E731
    return patch.object(EarlierRun, "done", skips)


def guesses() -> AbstractContextManager:
    """Leave the first wrong token of a draft in the KV cache."""
    take = Speculation.take_unconfirmed

    def longer(self: Speculation, lane: int) -> list[tuple[int, int, int]]:
        return [(rank, slot, length + 1) for rank, slot, length in take(self, lane)]

    return patch.object(Speculation, "take_unconfirmed", longer)


MUTATIONS: dict[str, Callable[[], AbstractContextManager]] = {
    f.__name__: f for f in (inputs, scheduler, placement, prefixes, adapters, resume, guesses)
}
