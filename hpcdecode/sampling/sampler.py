"""Logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from hpcdecode.sampling.adjust import adjust
from hpcdecode.sampling.draw import draw
from hpcdecode.sampling.philox import uniform
from hpcdecode.sampling.structured import Grammars
from hpcdecode.schedule.sequence import Sequence

_BLOCK = 256  # tokens whose largest logit is looked at first
_PART = 1 << 21  # logits that are worked on at once, so that they stay in the cache


def sample(
    logits: Tensor,
    sequences: Seq[Sequence],
    eos: frozenset[int] = frozenset(),
    grammars: Grammars | None = None,
) -> list[int]:
    """The next token of each sequence from its row of logits [n, vocab], of any float dtype; they are left as they are.

    What a row asks for applies in the order of vLLM's V1 sampler: bad_words, min_tokens, logit_bias, repetition,
    frequency and presence penalty, after which a greedy row takes its largest logit; then temperature, min_p, top_k
    (which keeps all that equal the k-th), top_p. eos: what min_tokens keeps back beside a row's own stop tokens.
    grammars: needed where rows have structured_outputs. A draw
    depends on (seed, row, sample, position) alone, so the same logits give the same token however the job is split.
    """
    if all(s.prompt.params.takes_largest for s in sequences):
        return argmax(logits).tolist()
    chosen = [row for row, s in enumerate(sequences) if s.prompt.params.temperature == 0]
    drawn = [row for row, s in enumerate(sequences) if s.prompt.params.temperature > 0]
    tokens = np.empty(len(sequences), np.int64)
    count = max(_PART // logits.shape[1], 1)
    work = torch.empty(count, logits.shape[1], device=logits.device)  # reused: fresh pages cost more than the sums
    for rows, way in ((chosen, _choose), (drawn, _draw)):
        for part in (rows[i : i + count] for i in range(0, len(rows), count)):
            own, beside = work[: len(part)], [sequences[i] for i in part]
            own.copy_(logits[part])
            adjust(own, beside, eos, grammars)
            tokens[part] = way(own, beside).cpu()
    return tokens.tolist()


def _choose(logits: Tensor, _sequences: list[Sequence]) -> Tensor:
    return argmax(logits)


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    columns = [(s.prompt.params.seed, s.prompt.line, s.sample, len(s.generated)) for s in sequences]
    uniforms = torch.from_numpy(uniform(*np.array(columns, dtype=np.int64).T)).to(logits.device)
    return draw(logits, [s.prompt.params for s in sequences], uniforms)


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row [n, vocab], as `torch.argmax`, which is many times slower on a CPU.

    A block of tokens first, by its largest logit, then one in it; the last block overlaps the one before.
    """
    vocabulary = logits.shape[1]
    if vocabulary <= _BLOCK:
        return logits.argmax(dim=-1)
    whole = vocabulary // _BLOCK
    largest = logits[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).amax(dim=-1)
    largest = torch.cat([largest, logits[:, -_BLOCK:].amax(dim=-1, keepdim=True)], dim=1)
    begin = (largest.argmax(dim=-1, keepdim=True) * _BLOCK).clamp_(max=vocabulary - _BLOCK)
    block = logits.gather(1, begin + torch.arange(_BLOCK, device=logits.device))
    return (begin + block.argmax(dim=-1, keepdim=True)).squeeze(1)
