"""What R-ranks tell an S-rank of tickets in `Plan.swap_in`: one message each, once all is back or known to be lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpcdecode.exchange.shares import Share
from hpcdecode.mpi.wait import wait

_SWAP = 4  # message tag, beside those of `mpi`


class _Return:
    """One message to come: a ticket, and whether all of it is back."""

    def __init__(self, comm: MPI.Intracomm, rank: int):
        self.content = np.zeros(2, np.int32)
        self._request = comm.Irecv([self.content, MPI.INT32_T], rank, _SWAP)

    def Test(self) -> bool:
        """Return whether it has come."""
        return self._request.Test()


class ReturnReceiver:
    """The S-rank's end of a lane.

    Args:
        comm: of the lane.
        tellers: R-ranks that tell of a ticket: all, if each has some heads of it, else one.
    """

    def __init__(self, comm: MPI.Intracomm, tellers: int):
        self._comm, self._tellers = comm, tellers
        self._answers: list[_Return] = []
        self._told: dict[int, list[bool]] = {}

    def expect(self, shares: Sequence[Share]) -> None:
        """Expect what R-ranks will tell of their shares of a plan."""
        for rank, share in enumerate(shares, 1):
            self._answers += [_Return(self._comm, rank) for _ in share.swap_in]

    def take(self) -> list[tuple[int, bool]]:
        """Return the tickets of which all is told since the last call, and whether all is back."""
        if not self._answers:
            return []
        waiting = []
        for answer in self._answers:
            if answer.Test():
                ticket, back = answer.content.tolist()
                self._told.setdefault(ticket, []).append(bool(back))
            else:
                waiting.append(answer)
        self._answers = waiting
        whole = [ticket for ticket, told in self._told.items() if len(told) == self._tellers]
        return [(ticket, all(self._told.pop(ticket))) for ticket in whole]

    def close(self) -> None:
        """Take what is still to come."""
        for answer in self._answers:
            wait(answer)


class ReturnTeller:
    """An R-rank's end of a lane."""

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self._sent: list[MPI.Request] = []

    def tell(self, results: Sequence[tuple[int, bool]]) -> None:
        """Send the S-rank tickets, and whether all is back."""
        for ticket, back in results:
            message = [np.array([ticket, back], np.int32), MPI.INT32_T]
            self._sent = [request for request in self._sent if not request.Test()]
            self._sent.append(self._comm.Isend(message, 0, _SWAP))

    def close(self) -> None:
        """Complete what is under way."""
        for request in self._sent:
            wait(request)
