"""What an S-rank does between the turns of its lanes: hand in results, serve or ask for rows, stop when told."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from hpcdecode.engine.desk import Desk
from hpcdecode.engine.s_rank import SRank
from hpcdecode.mpi.wait import Backoff
from hpcdecode.report.progress import Progress
from hpcdecode.system.signals import Signals

if TYPE_CHECKING:
    from hpcdecode.engine.remote import Clients, RemoteDesk


def run_lead(
    s_rank: SRank,
    desk: Desk,
    signals: Signals,
    progress: Progress,
    clients: Clients | None = None,
) -> bool:
    """Run the lead's lanes, and serve the other S-ranks' questions for rows until they have none.

    Args:
        s_rank: of this process.
        desk: where rows come from and results go.
        signals: tell when to stop.
        progress: shown to the user.
        clients: the other S-ranks, if there are any.

    Returns:
        Whether the work is done; not if an S-rank was lost when no other wanted its rows.
    """
    desk.writer.unfinished = lambda: [
        *desk.unfinished(),
        *s_rank.unfinished(),
        *(clients.unfinished() if clients else ()),
    ]
    progress.restart()

    def duties() -> None:
        s_rank.stopping = signals.stopping
        for line in desk.take_cancelled():
            s_rank.cancel(line)
            if clients:
                clients.cancel(line)
        if clients:
            clients.serve(stop=s_rank.stopping)
        desk.writer.tick()
        if progress.due():
            tokens = s_rank.tokens + (clients.tokens if clients else 0)
            progress.update(desk.done, tokens, s_rank.tokens_in_flight, (desk.rows, desk.generated_tokens))

    s_rank.run(duties)
    backoff = Backoff()
    while clients and clients.open:
        duties()
        backoff.pause()
    progress.close(desk.done)
    return signals.stopping or desk.exhausted()


def run_remote(s_rank: SRank, desk: RemoteDesk, checkpoint_seconds: float) -> None:
    """Run the lanes of an S-rank that is not the lead; hand in what is in flight every so many seconds."""
    checkpoint_due = monotonic() + checkpoint_seconds

    def duties() -> None:
        nonlocal checkpoint_due
        s_rank.stopping = s_rank.stopping or desk.told_to_stop()
        for line in desk.take_cancelled():
            s_rank.cancel(line)
        if monotonic() >= checkpoint_due:
            desk.checkpoint(s_rank.unfinished())
            checkpoint_due = monotonic() + checkpoint_seconds

    s_rank.run(duties)
    desk.close(s_rank.unfinished())
