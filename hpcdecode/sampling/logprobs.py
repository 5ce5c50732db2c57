"""Log-probabilities of tokens, and of the most likely tokens in their place, from the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcdecode.sampling.draw import largest

_PART = 1 << 21  # logits that are worked on at once

Entry = tuple[float, list[int], list[float]]  # log-probability of a token; most likely tokens; theirs


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Entry]:
    """Yield for each row of logits the log-probability of its token, its `counts` most likely tokens and theirs.

    Which of equally likely tokens are among them does not depend on the other rows.

    Args:
        logits: [n, vocab], of any float dtype.
        tokens: [n] token ids.
        counts: [n], each at least 0.
    """
    rows = max(_PART // logits.shape[1], 1)
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        yield from _part(logits[part].float(), tokens[part], counts[part])


def _part(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Entry]:
    norms = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - norms
    top: list[tuple[list[int], list[float]]] = [([], [])] * len(tokens)
    for count in set(counts) - {0}:
        rows = [row for row, own in enumerate(counts) if own == count]
        values, ids = largest(logits[rows], count)
        for row, likeliest, own in zip(rows, ids.tolist(), (values - norms[rows]).tolist(), strict=True):
            top[row] = likeliest, own
    for logprob, (likeliest, own) in zip(chosen[:, 0].tolist(), top, strict=True):
        yield logprob, likeliest, own
