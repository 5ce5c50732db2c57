"""Log-probabilities of tokens, and of the most likely ones in their place, from the logits as the model made them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from hpcdecode.sampling.draw import largest

_PART = 1 << 21  # logits that are worked on at once

Entry = tuple[float, list[int], list[float]]  # what `Logprobs.add` takes


def logprobs(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> Iterator[Entry]:
    """For each row of logits [n, vocab], of any float dtype: the log-probability of its token, the `counts` most likely
    tokens and theirs."""
    rows = max(_PART // logits.shape[1], 1)
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        yield from _part(logits[part].float(), tokens[part], counts[part])


def _part(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> Iterator[Entry]:
    norms = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - norms
    values, ids = largest(logits, max(counts)) if max(counts) else (logits[:, :0], logits[:, :0].long())
    rows = zip(chosen[:, 0].tolist(), ids.tolist(), (values - norms).tolist(), counts, strict=True)
    for own, top_ids, top, count in rows:
        yield own, top_ids[:count], top[:count]
