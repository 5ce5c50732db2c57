"""Logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from hpcdecode.sampling.adjust import adjust
from hpcdecode.sampling.draw import draw
from hpcdecode.sampling.philox import uniform
from hpcdecode.schedule.sequence import Sequence

_BLOCK = 256  # tokens whose largest logit is looked at first
_PART = 1 << 21  # logits that are worked on at once, so that they stay in the cache


def sample(logits: Tensor, sequences: Seq[Sequence], eos: frozenset[int] = frozenset()) -> list[int]:
    """The next token of each sequence from its row of logits [n, vocab], of any float dtype; they are left as they are.

    What a row asks for applies in the order of vLLM's V1 sampler: bad_words, min_tokens, logit_bias, repetition,
    frequency and presence penalty, after which a greedy row takes its largest logit; then temperature, min_p, top_k
    (which keeps all that equal the k-th), top_p. eos: what min_tokens keeps back beside a row's own stop tokens. A draw
    depends on (seed, row, sample, position) alone, so the same logits give the same token however the job is split.
    """
    params = [s.prompt.params for s in sequences]
    special = [i for i, p in enumerate(params) if p.temperature > 0 or p.changes_logits]
    if not special:
        return argmax(logits).tolist()
    tokens = np.zeros(len(sequences), np.int64)
    plain = np.setdiff1d(np.arange(len(sequences)), special)
    if len(plain):
        tokens[plain] = argmax(logits[torch.from_numpy(plain)]).cpu()
    count = max(_PART // logits.shape[1], 1)
    for part in (special[i : i + count] for i in range(0, len(special), count)):
        tokens[part] = _choose(logits[part].float(), [sequences[i] for i in part], eos).cpu()
    return tokens.tolist()


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


def _choose(logits: Tensor, sequences: list[Sequence], eos: frozenset[int]) -> Tensor:
    adjust(logits, sequences, eos)
    params = [s.prompt.params for s in sequences]
    random = [i for i, p in enumerate(params) if p.temperature > 0]
    if len(random) == len(sequences):
        return draw(logits, params, _uniforms(sequences, logits.device))
    tokens = argmax(logits)
    if random:
        drawing = [sequences[i] for i in random]
        tokens[random] = draw(logits[random], [params[i] for i in random], _uniforms(drawing, logits.device))
    return tokens


def _uniforms(sequences: list[Sequence], device: torch.device) -> Tensor:
    columns = [(s.prompt.params.seed, s.prompt.line, s.sample, len(s.generated)) for s in sequences]
    return torch.from_numpy(uniform(*np.array(columns, dtype=np.int64).T)).to(device)
