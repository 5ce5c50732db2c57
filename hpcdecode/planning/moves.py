"""The clock of a simulated R-rank, and what moves between memory and tiers meanwhile.

Moves run one after the other, in the order in which jobs begin them, each at the rate of its tier. While the rank
computes, both take longer: threads that compute meet at barriers, hundreds of times a step, and all of them wait while
one has lost its core to a move. So what a move computes costs the rank its whole time, on however many cores. While the
rank waits, moves have all they need.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcdecode._attn_cpu import PageMove
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.page_store import PageStore
from hpcdecode.engine.tier_speed import TierSpeed
from hpcdecode.system.tier import Chunk

_NOTHING = 1e-12  # seconds


class SimulatedTier:
    """A tier that holds nothing.

    Args:
        chunks: Number of chunks.
        speed: Of the tier.
    """

    def __init__(self, chunks: int, speed: TierSpeed):
        self.chunks, self.speed = chunks, speed

    def reserve(self) -> None:
        """Do nothing."""

    def write(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Do nothing."""

    def read(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SimulatedStore(PageStore):
    """Counts what pages move, and the seconds that it takes.

    Args:
        sizes: Of pages.
        tiers: In the order in which they are filled, with chunks of a page and its journal.
        row_bytes: Bytes of a token at every layer.

    Attributes:
        order: (`read` or `write`, page) of every move, in order; None to keep none.
    """

    def __init__(self, sizes: PageSizes, tiers: list[SimulatedTier], row_bytes: Sequence[int]):
        super().__init__(sizes, [], None, tiers, row_bytes)
        self.order: list[tuple[str, tuple[int, int]]] | None = None
        self._seconds, self._speed = 0.0, tiers[0].speed

    def read(self, move: PageMove) -> int:
        """Return the bytes that `PageStore.read` reads."""
        return self._count(move)

    def write(self, move: PageMove) -> int:
        """Return the bytes that `PageStore.write` writes."""
        return self._count(move)

    def last_move(self) -> tuple[float, float]:
        """Return the seconds of the last move, and the threads that compute for it."""
        return self._seconds, self._speed.busy_threads

    def _count(self, move: PageMove) -> int:
        tier, nbytes = self.place(move.page)[0], move.nbytes
        assert isinstance(tier, SimulatedTier), "simulated pages are in simulated tiers"
        self._speed = tier.speed
        self._seconds = tier.speed.seconds(nbytes, self.sizes.page_bytes, move.writes)
        if self.order is not None:
            self.order.append(("write" if move.writes else "read", move.page))
        return nbytes


@dataclass(slots=True)
class _TierMove:
    left: float  # seconds
    busy_threads: float
    done: Callable[[int], None]
    nbytes: int


class SimulatedMovers:
    """The clock of an R-rank, on which its moves come to an end. It stands in for threads that move.

    Args:
        last_move: Returns the seconds of a move that was just made, and the threads that compute for it.

    Attributes:
        now: Seconds.
        waited: Of these, seconds in which attention waited for moves.
    """

    def __init__(self, last_move: Callable[[], tuple[float, float]]):
        self.waited = 0.0
        self.now, self._last_move = 0.0, last_move
        self._moves: deque[_TierMove] = deque()

    def move(self, move: Callable[[], int], done: Callable[[int], None]) -> None:
        """Begin a move: it comes to its end behind those before it."""
        nbytes = move()
        seconds, busy = self._last_move()
        self._moves.append(_TierMove(seconds, busy, done, nbytes))

    @property
    def busy(self) -> bool:
        """Return whether any move is under way."""
        return bool(self._moves)

    def wait(self, changed: threading.Condition) -> None:
        """Let time pass until the next move is done.

        Raises:
            RuntimeError: If none is under way.
        """
        if not self._moves:
            raise RuntimeError("expected a move that ends the wait, got none")
        self.waited += self._moves[0].left
        self._pass(self._moves[0].left, 1.0)

    def compute(self, seconds: float) -> None:
        """Let the rank compute for what takes so many seconds with all of its cores."""
        left = seconds
        while self._moves and left > _NOTHING:
            span = min(left, self._moves[0].left)
            left -= span
            self._pass(span, 1 + self._moves[0].busy_threads)
        self.now += left

    def idle(self, until: float) -> None:
        """Let time pass up to a moment, if that is later."""
        while self._moves and until - self.now > _NOTHING:
            self._pass(min(self._moves[0].left, until - self.now), 1.0)
        self.now = max(self.now, until)

    def close(self) -> None:
        """Do nothing."""

    def _pass(self, span: float, slower: float) -> None:
        """Let the first move go on for `span` seconds of its own, which take `slower` times as long."""
        first = self._moves[0]
        self.now += span * slower
        first.left -= span
        if first.left <= _NOTHING:
            self._moves.popleft()
            first.done(first.nbytes)
