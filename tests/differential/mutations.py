"""Faults that the differential test must find, put into the running program by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hpcdecode.data.resume import Earlier
from hpcdecode.schedule.injector import Injector
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.prefixes import Prefix, Prefixes
from hpcdecode.schedule.sequence import Sequence
from hpcdecode.workers.inputs import Inputs


def inputs() -> None:
    """Take rows of logits as they are if there are as many as sampled sequences; the check that sees it is off."""

    def drawn(self: Inputs, rows: Tensor) -> Tensor:
        same = self._drawn is None or len(self._drawn) == len(rows)
        return rows if same else rows[self._drawn.to(rows.device)]

    Inputs.drawn, Inputs._check_drawn = drawn, lambda self, *_: None


def injector() -> None:
    """Let beams fork from the slot of the likeliest one, whichever beam they go on from."""
    move = Injector._move

    def moved(self: Injector, family: list[Sequence]) -> None:
        before = len(self._forks)
        first = family[0].slot
        move(self, family)
        self._forks[before:] = [(rank, first, new) for rank, _, new in self._forks[before:]]

    Injector._move = moved


def placement() -> None:
    """Forget what an R-rank holds already when asking whether more fits."""
    Placement.fits = lambda self, rank, extra: self.tokens(extra) <= self.capacity[rank]


def prefixes() -> None:
    """Share one block more than the prompts have in common."""
    find = Prefixes.find

    def found(self: Prefixes, ids: list[int]) -> tuple[Prefix | None, int]:
        known, length = find(self, ids)
        longer = length + self.block_tokens
        return known, longer if length and longer < len(ids) else length

    Prefixes.find = found


def resume() -> None:
    """Take the row after a finished one for finished too."""
    done = Earlier.done
    Earlier.done = lambda self, line: done(self, line) or (line % 5 == 0 and done(self, line - 1))


MUTATIONS: dict[str, Callable[[], None]] = {f.__name__: f for f in (inputs, injector, placement, prefixes, resume)}
