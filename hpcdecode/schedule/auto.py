"""`--batch auto --period auto`: B and F from the KV capacity and the lengths of the first rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from hpcdecode.data.tokens import Prompt

LOOKAHEAD = 256  # rows looked at, and the largest B chosen
_FULL = 0.9  # part of the KV capacity that the steady state may take
_PERIODS = 16  # injections in the life of a sequence: peak load is (1 + 1/16)/2 of the static one


def choose(
    batch: int | None, period: int | None, first: Seq[Prompt], all_rows: bool, max_tokens: int, capacity: int
) -> tuple[int, int, int]:
    """B, F and S, from those that are given and the first rows of the job.

    all_rows: whether `first` is the whole job; then all of it starts at once where it fits.
    capacity: KV tokens of all R-ranks. The steady state holds B*(P + (S+F)/2) tokens (FastDecode, section 4.2).
    """
    steps = max((p.params.max_tokens for p in first), default=max_tokens)
    sequences = sum(p.params.samples for p in first)
    prompt = sum(len(p.token_ids) * p.params.samples for p in first) / max(sequences, 1)
    if all_rows and sequences <= (batch or LOOKAHEAD) and sequences * (prompt + steps) <= _FULL * capacity:
        return batch or max(sequences, 1), period or steps, steps
    period = min(period or max(steps // _PERIODS, 1), steps)
    if batch is None:
        batch = int(_FULL * capacity / (prompt + (steps + period) / 2))
        batch = max(min(batch, LOOKAHEAD), 1, *(p.params.samples for p in first))
    return batch, period, steps
