"""What sequences leave in the tiers of R-ranks, as the S-rank counts it, and whether it pays to move them there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from hpcdecode.attention.footprint import WHOLE, Footprint
from hpcdecode.errors import InvariantViolation
from hpcdecode.requests.swapped import SwapTicket


class Swaps:
    """The room in tiers as one S-rank may use it; shared by all its lanes.

    Args:
        chunks: of the tiers of each R-rank.
        chunk_tokens: group tokens of a chunk, the same on all.
        rates: group tokens that each R-rank writes, or reads, in a second.
        footprint: what a sequence takes.

    Attributes:
        prefill_seconds: of a token, as this job has taken so far; 0 until that is known.
        moved: sequences that left for a tier; moved_tokens: their tokens.
        failures: sequences that a tier did not bring back.
    """

    def __init__(self, chunks: Sequence[int], chunk_tokens: int, rates: Sequence[float], footprint: Footprint = WHOLE):
        self.chunks, self.chunk_tokens, self.rates = tuple(chunks), chunk_tokens, tuple(rates)
        self.footprint = footprint
        self.prefill_seconds = 0.0
        self.moved = self.moved_tokens = self.failures = 0
        self._free = list(chunks)
        self._held: dict[int, SwapTicket] = {}
        self._numbers = count()

    def take(self, rank: int, tokens: int) -> SwapTicket | None:
        """Return a ticket for a sequence of an R-rank; None if there is no room, or prefilling it again is cheaper.

        It is cheaper if its tokens take less time to prefill than what is kept of them to write and to read.
        """
        kept = self.footprint.tokens(tokens)
        chunks = -(-kept // self.chunk_tokens)
        if chunks > self._free[rank] or self.prefill_seconds * self.rates[rank] * tokens < 2 * kept:
            return None
        ticket = SwapTicket(rank, next(self._numbers), chunks)
        self._held[ticket.number] = ticket
        self._free[rank] -= chunks
        self.moved += 1
        self.moved_tokens += tokens
        return ticket

    def give_back(self, ticket: SwapTicket) -> None:
        """Count a ticket no longer: what it stood for is back, or lost."""
        del self._held[ticket.number]
        self._free[ticket.rank] += ticket.chunks

    def check(self) -> None:
        """Raise InvariantViolation unless chunks are free or held by a ticket."""
        for rank, chunks in enumerate(self.chunks):
            held = sum(t.chunks for t in self._held.values() if t.rank == rank)
            if held + self._free[rank] != chunks or self._free[rank] < 0:
                raise InvariantViolation(
                    "chunks of tiers are free or held",
                    f"R-rank {rank}: {held} held, {self._free[rank]} free of {chunks}",
                )

    @property
    def held(self) -> int:
        """Return how many sequences are in tiers."""
        return len(self._held)
