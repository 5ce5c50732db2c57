"""B, F and W_lim if they are not given: from the KV capacity and the lengths of the first rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcdecode.attention.footprint import ENDLESS, WHOLE, Footprint
from hpcdecode.requests.prompt import Prompt

LOOKAHEAD = 256  # rows looked at for each group on CPUs, and the largest B that is chosen there
FULL = 0.9  # share of the KV capacity that the steady state may take
PERIODS = 16  # injections in the life of a sequence: the peak load is (1 + 1/16)/2 of the static one


class Sizes(NamedTuple):
    """B, sequences at once; F, steps from micro-batch to micro-batch; S, steps in which a row decodes at most."""

    batch: int
    period: int
    steps: int


def choose(
    batch: int | None,
    period: int | None,
    first: Sequence[Prompt],
    all_rows: bool,
    max_tokens: int,
    capacity: int,
    context: int | None = None,
    groups: int = 1,
    footprint: Footprint = WHOLE,
    most: int = LOOKAHEAD,
    shared: int = 0,
) -> Sizes:
    """Return B, F and S of a group of ranks, from those that are given and the first rows of the job.

    The first token of a row comes with its prompt, so a row of n new tokens decodes in n - 1 steps. In the steady
    state B sequences hold B * (P + (S + F) / 2) tokens (FastDecode, section 4.2).

    Args:
        batch: B, or None to choose it.
        period: F, or None to choose it.
        first: rows at the beginning of the job.
        all_rows: whether `first` is the whole job; all of it starts at once if it fits.
        max_tokens: new tokens of a row, if there is none.
        capacity: KV tokens of the group's R-ranks.
        context: tokens of a prompt and what follows it at most; None if the model has no limit.
        groups: that share the rows.
        footprint: what a sequence takes of the capacity.
        most: largest B to choose, unless a row needs more at once.
        shared: prompt tokens of `first` that are held once, with those of other rows.
    """
    longest = min(footprint.longest(capacity), ENDLESS if context is None else context)
    steps = max(max((new_tokens(p, longest) for p in first), default=max_tokens) - 1, 1)
    once = shared / max(sum(p.sequences for p in first), 1)
    prompt, least = mean_prompt(first) - once, max((at_once(p) for p in first), default=1)
    sequences = max(-(-sum(p.sequences for p in first) // groups), least)
    if all_rows and sequences <= (batch or most) and sequences * footprint.held(prompt + steps) <= FULL * capacity:
        return Sizes(batch or sequences, period or steps, steps)
    period = min(period or max(steps // PERIODS, 1), steps)
    if batch is None:
        batch = int(FULL * capacity / footprint.held(prompt + (steps + period) / 2))
        batch = max(min(batch, most), least)
    return Sizes(batch, period, steps)


def new_tokens(prompt: Prompt, longest: int) -> int:
    """Return the most tokens that a row can generate if a sequence has at most `longest` tokens, prompt included."""
    return 1 if prompt.targets else min(prompt.params.max_tokens, max(longest - len(prompt.token_ids), 1))


def load_limit(batch: int, period: int, steps: int, prompt: float, capacity: int, footprint: Footprint = WHOLE) -> int:
    """Return W_lim of all lanes: the level load of B sequences of S steps, or of as many as the KV capacity allows.

    Args:
        batch: B.
        period: F.
        steps: S.
        prompt: mean tokens of prompts.
        capacity: KV tokens of all R-ranks.
        footprint: what a sequence takes of the capacity.
    """
    held = prompt + (steps + period) / 2
    return int(min(batch, FULL * capacity / footprint.held(held)) * held)


def mean_prompt(first: Sequence[Prompt]) -> float:
    """Return the mean prompt tokens over the samples of all rows."""
    return sum(p.input_tokens for p in first) / max(sum(p.sequences for p in first), 1)


def at_once(prompt: Prompt) -> int:
    """Return how many sequences of a row must run side by side: all samples, or one target."""
    return 1 if prompt.targets else prompt.params.samples


def usual_lanes(stages: int, copies: int, crosses: bool, prefill_ranks: int = 0) -> int:
    """Return the lanes of a group whose job does not state them.

    Args:
        stages: Of the group; each has a lane, and two if attention is elsewhere. One device has nothing to overlap.
        copies: Of the model in rotation; each has a lane, and one more attends meanwhile (Lamina).
        crosses: Whether q, k, v and o cross to other devices.
        prefill_ranks: Of the group; each has the prompts of a lane at least.
    """
    return max(copies + 1 if copies > 1 else (2 if crosses else 1) * stages, prefill_ranks)


def split(total: int, parts: int) -> list[int]:
    """Return `total` in `parts` whole numbers that differ by one at most."""
    return [total // parts + (i < total % parts) for i in range(parts)]
