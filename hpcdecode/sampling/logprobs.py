"""Log-probabilities of tokens, and of the most likely tokens in their place, from the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from hpcdecode.sampling.draw import largest
from hpcdecode.sampling.rows import rows_of, values_on

_PART = 1 << 21  # logits that are worked on at once, so that they stay in the cache
_PART_ON_DEVICE = 1 << 26  # the same on a device, which is waited for after each part

Entry = tuple[float, list[int], list[float]]  # log-probability of a token; most likely tokens; theirs


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Entry]:
    """Yield for each row of logits the log-probability of its token, its `counts` most likely tokens and theirs.

    Which of equally likely tokens are among them does not depend on the other rows.

    Args:
        logits: [n, vocab], of any float dtype.
        tokens: [n] token ids.
        counts: [n], each at least 0.
    """
    rows = max((_PART if logits.device.type == "cpu" else _PART_ON_DEVICE) // logits.shape[1], 1)
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        yield from _part(logits[part].float(), tokens[part], counts[part])


def _norms(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of exp of each row of logits [n, vocab], [n, 1].

    Torch adds up one row on all threads, in another order than one of several.
    """
    if len(logits) == 1:
        return torch.cat([logits, logits]).logsumexp(dim=-1, keepdim=True)[:1]
    return logits.logsumexp(dim=-1, keepdim=True)


def _part(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Entry]:
    norms = _norms(logits)
    chosen = logits.gather(1, values_on(logits.device, tokens, torch.int64)[:, None]) - norms
    parts = [chosen[:, 0]]
    rows_by_count = {n: [row for row, own in enumerate(counts) if own == n] for n in sorted(set(counts) - {0})}
    for count, rows in rows_by_count.items():
        values, ids = largest(rows_of(logits, rows), count)
        parts += [(values - rows_of(norms, rows)).flatten(), ids.flatten()]
    found = iter(torch.cat([part.double() for part in parts]).tolist())  # float64 has all of these numbers
    own = list(islice(found, len(tokens)))
    top: list[tuple[list[int], list[float]]] = [([], [])] * len(tokens)
    for count, rows in rows_by_count.items():
        values_of, ids_of = ([list(islice(found, count)) for _ in rows] for _ in range(2))
        for row, likeliest, theirs in zip(rows, ids_of, values_of, strict=True):
            top[row] = list(map(int, likeliest)), theirs
    for logprob, (likeliest, theirs) in zip(own, top, strict=True):
        yield logprob, likeliest, theirs
