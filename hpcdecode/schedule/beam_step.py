"""How the beams of a request go on after a step, as their search says."""

from __future__ import annotations

from hpcdecode.requests.sequence import CANCELLED, Request
from hpcdecode.schedule.slots import Slots


def update_beams(request: Request, slots: Slots) -> None:
    """Let beams go on with tokens of their own in slots of a lane, or end."""
    beams, sequences = request.beams, request.sequences
    assert beams is not None
    if request.cancelled:
        for sequence in sequences:
            sequence.finish_reason = CANCELLED
        return
    if not beams.moves:
        for sequence, hypothesis in zip(sequences, beams.best, strict=True):
            sequence.end_as(hypothesis)
        return
    before = [s.generated for s in sequences]
    for sequence, move in zip(sequences, beams.moves, strict=True):
        sequence.generated = [*before[move.parent], move.token]
    if before[0]:  # else the prompt's slot is forked once it is prefilled
        slots.follow(request, [move.parent for move in beams.moves])
