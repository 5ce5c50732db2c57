"""B, F and W_lim where they are not given: from the KV capacity and the lengths of the first rows."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.requests.prompt import Prompt

LOOKAHEAD = 256  # rows looked at, and the largest B chosen
FULL = 0.9  # part of the KV capacity that the steady state may take
PERIODS = 16  # injections in the life of a sequence: peak load is (1 + 1/16)/2 of the static one


def choose(
    batch: int | None,
    period: int | None,
    first: Sequence[Prompt],
    all_rows: bool,
    max_tokens: int,
    capacity: int,
    context: int | None = None,
) -> tuple[int, int, int]:
    """B, F and S, from those that are given and the first rows of the job.

    S: steps in which a row decodes at most; its first token comes with its prompt.

    all_rows: whether `first` is the whole job; then all of it starts at once where it fits.
    capacity: KV tokens of all R-ranks. The steady state holds B*(P + (S+F)/2) tokens (FastDecode, section 4.2).
    context: tokens of a prompt and what follows it at most; None if the model has no limit.
    """
    longest = capacity if context is None else min(capacity, context)
    steps = max(max((new_tokens(p, longest) for p in first), default=max_tokens) - 1, 1)
    sequences, prompt = sum(p.params.samples for p in first), mean_prompt(first)
    if all_rows and sequences <= (batch or LOOKAHEAD) and sequences * (prompt + steps) <= FULL * capacity:
        return batch or max(sequences, 1), period or steps, steps
    period = min(period or max(steps // PERIODS, 1), steps)
    if batch is None:
        batch = int(FULL * capacity / (prompt + (steps + period) / 2))
        batch = max(min(batch, LOOKAHEAD), 1, *(p.params.samples for p in first))
    return batch, period, steps


def new_tokens(prompt: Prompt, longest: int) -> int:
    """Tokens that a row can generate where a sequence has no more than `longest` tokens, its prompt included."""
    return min(prompt.params.max_tokens, max(longest - len(prompt.token_ids), 1))


def load_limit(batch: int, period: int, steps: int, prompt: float, capacity: int) -> int:
    """W_lim of all lanes: the load at which B sequences of S steps are level, or what the KV capacity allows.

    prompt: mean tokens of prompts.
    """
    return int(min(batch * (prompt + (steps + period) / 2), FULL * capacity))


def mean_prompt(first: Sequence[Prompt]) -> float:
    """Tokens, over the samples of all rows."""
    return sum(len(p.token_ids) * p.params.samples for p in first) / max(sum(p.params.samples for p in first), 1)


def split(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers that differ by one at most."""
    return [total // parts + (i < total % parts) for i in range(parts)]
