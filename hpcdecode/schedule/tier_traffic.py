"""What a lane has moved to the tiers of its R-ranks, and what comes back from there."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.errors import InvariantViolation
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.swapped import SwapTicket
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Table, table_of
from hpcdecode.schedule.swaps import Swaps


class TierTraffic:
    """The tickets of a lane.

    Args:
        placement: of the S-rank.
        swaps: of the S-rank; None if R-ranks have no tiers.

    Attributes:
        returning: sequences whose K and V are being brought back, by ticket.
    """

    def __init__(self, placement: Placement, swaps: Swaps | None):
        self.placement, self.swaps = placement, swaps
        self.returning: dict[int, SequenceState] = {}
        self._results: list[tuple[int, bool]] = []
        self._out: list[tuple[int, int, int]] = []  # rows of the next plan
        self._in: list[tuple[int, int, int, int]] = []

    def note(self, results: Sequence[tuple[int, bool]]) -> None:
        """Take note of tickets that R-ranks have dealt with, and whether all is back."""
        self._results += results

    @property
    def has_news(self) -> bool:
        """Return whether `settle` has anything to return."""
        return bool(self._results)

    def settle(self) -> tuple[list[SequenceState], list[SequenceState]]:
        """Return the sequences that are back since the last call, and those that are lost; none has a ticket any more.

        Those that are lost still have their R-rank and slot.
        """
        results, self._results = self._results, []
        back: list[SequenceState] = []
        lost: list[SequenceState] = []
        for number, whole in results:
            sequence = self.returning.pop(number, None)
            if sequence is None or sequence.swap is None or self.swaps is None:
                raise InvariantViolation("R-ranks tell of tickets that are out", f"ticket {number} is not")
            self.swaps.give_back(sequence.swap)
            self.swaps.failures += not whole
            sequence.swap = None
            (back if whole else lost).append(sequence)
        return back, lost

    def move_out(self, sequence: SequenceState) -> SwapTicket | None:
        """Return a ticket for a sequence that gives up its slot, which is open; None if its K and V are to be dropped.

        It comes back to the same R-rank, so that must have room for all that it may take.
        """
        if self.swaps is None or sequence.prefilled < sequence.prompt_length:
            return None
        if not self.placement.holds_alone(sequence.rank, sequence):
            return None
        ticket = self.swaps.take(sequence.rank, sequence.length)
        if ticket is not None:
            self._out.append((sequence.rank, sequence.slot, ticket.number))
        return ticket

    def bring_back(self, sequences: Sequence[SequenceState]) -> list[SequenceState]:
        """Have sequences with tickets brought back to the slots that they have been given; return the others."""
        for sequence in sequences:
            if sequence.swap is not None:
                self.returning[sequence.swap.number] = sequence
                self._in.append((sequence.rank, sequence.slot, sequence.swap.number, sequence.length))
        return [sequence for sequence in sequences if sequence.swap is None]

    def take_rows(self) -> tuple[Table, Table]:
        """Return `swap_out` and `swap_in` of the next plan."""
        rows = table_of(self._out, 3), table_of(self._in, 4)
        self._out, self._in = [], []
        return rows

    def check(self) -> None:
        """Raise InvariantViolation unless chunks of tiers are free or held by a ticket."""
        if self.swaps:
            self.swaps.check()
