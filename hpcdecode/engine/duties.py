"""What an S-rank does between the turns of its lanes: hand in results, serve or ask for rows, stop when told."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from hpcdecode.engine.desk import Desk
from hpcdecode.engine.s_rank import SRank
from hpcdecode.mpi.wait import Backoff
from hpcdecode.report.progress import Progress
from hpcdecode.system.signals import Signals

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.engine.remote import RemoteDesk


def run_lead(
    s_rank: SRank,
    desk: Desk,
    signals: Signals,
    progress: Progress,
    s_comm: MPI.Intracomm | None = None,
    batches: Sequence[int] = (),
) -> None:
    """Run the lead's lanes, and serve the other S-ranks' questions for rows until they have none.

    Args:
        s_rank: of this process.
        desk: where rows come from and results go.
        signals: tell when to stop.
        progress: shown to the user.
        s_comm: the S-ranks, the lead first; None if it is the only one.
        batches: B of every S-rank, if there are several.
    """
    clients = None
    if s_comm is not None:
        from hpcdecode.engine.remote import Clients

        clients = Clients(desk, s_comm, batches)
    desk.writer.unfinished = lambda: [
        *desk.unfinished(),
        *s_rank.unfinished(),
        *(clients.unfinished() if clients else ()),
    ]
    progress.restart()

    def duties() -> None:
        s_rank.stopping = signals.stopping
        if clients:
            clients.serve(stop=s_rank.stopping)
        desk.writer.tick()
        if progress.due():
            tokens = s_rank.tokens + (clients.tokens if clients else 0)
            progress.update(desk.rows, tokens, s_rank.tokens_in_flight)

    s_rank.run(duties)
    backoff = Backoff()
    while clients and clients.open:
        duties()
        backoff.pause()
    progress.close(desk.rows)


def run_remote(s_rank: SRank, desk: RemoteDesk, checkpoint_seconds: float) -> None:
    """Run the lanes of an S-rank that is not the lead; hand in what is in flight every so many seconds."""
    checkpoint_due = monotonic() + checkpoint_seconds

    def duties() -> None:
        nonlocal checkpoint_due
        s_rank.stopping = s_rank.stopping or desk.told_to_stop()
        if monotonic() >= checkpoint_due:
            desk.checkpoint(s_rank.unfinished())
            checkpoint_due = monotonic() + checkpoint_seconds

    s_rank.run(duties)
    desk.close(s_rank.unfinished())
