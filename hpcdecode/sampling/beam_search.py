"""A step of beam search: the most likely continuations of the beams, from their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdecode.requests.beams import Beams, Move
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.sampling.draw import largest
from hpcdecode.sampling.rows import rows_of, values_on


def advance_beams(logits: Tensor, sequences: Sequence[SequenceState]) -> None:
    """Take a step of every beam search among `sequences`.

    Args:
        logits: [n, vocab], of any float dtype.
        sequences: [n]; those without a beam search are left as they are.
    """
    rows: dict[Beams, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.beams is not None:
            rows.setdefault(sequence.beams, []).append(row)
    for beams, own in rows.items():
        beams.advance(_likeliest(rows_of(logits, own[: len(beams.logprobs)]).float(), beams))


def _likeliest(logits: Tensor, beams: Beams) -> list[Move]:
    """Return the most likely moves from the logits [beams, vocab] of one search, best first."""
    count = min(beams.candidates, logits.shape[1])
    values, ids = largest(logits.log_softmax(dim=-1), count)
    values += values_on(logits.device, beams.logprobs, torch.float32)[:, None]
    best = values.flatten().sort(descending=True, stable=True).indices[: beams.candidates]
    found = torch.stack([best.double(), ids.flatten()[best].double(), values.flatten()[best].double()])
    return [Move(int(i) // count, int(token), logprob) for i, token, logprob in found.t().tolist()]
