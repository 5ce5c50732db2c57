"""Logits to tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from hpcdecode.sampling.adjust import adjust
from hpcdecode.sampling.draw import draw, draw_filtered, is_filtered
from hpcdecode.sampling.params import SamplingParams
from hpcdecode.sampling.philox import uniform
from hpcdecode.schedule.sequence import Sequence

_BLOCK = 256  # tokens whose largest logit is looked at first
_PART = 1 << 20  # logits that are worked on at once, so that they stay in the cache


def sample(logits: Tensor, sequences: Seq[Sequence], eos: frozenset[int] = frozenset()) -> list[int]:
    """The next token of each sequence from its row of logits [n, vocab], of any float dtype; they are left as they are.

    What a row asks for applies in the order of vLLM's V1 sampler: bad_words, min_tokens, logit_bias, repetition,
    frequency and presence penalty, after which a greedy row takes its largest logit; then temperature, min_p, top_k
    (which keeps all that equal the k-th), top_p. eos: what min_tokens keeps back beside a row's own stop tokens. A draw
    depends on (seed, row, sample, position) alone, so the same logits give the same token however the job is split.
    """
    ways: dict[Callable, list[int]] = defaultdict(list)
    for row, sequence in enumerate(sequences):
        ways[_way(sequence.prompt.params, logits.shape[1])].append(row)
    if list(ways) == [_as_it_is]:
        return argmax(logits).tolist()
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    count = max(_PART // logits.shape[1], 1)
    for way, rows in ways.items():
        for part in (rows[i : i + count] for i in range(0, len(rows), count)):
            index = torch.tensor(part, device=logits.device)
            tokens[index] = way(logits.index_select(0, index), [sequences[i] for i in part], eos)
    return tokens.tolist()


def _way(params: SamplingParams, vocabulary: int) -> Callable[[Tensor, list[Sequence], frozenset[int]], Tensor]:
    """How a row's token is chosen: rows are worked on together with others of the same way."""
    if params.temperature == 0:
        return _changed if params.changes_logits else _as_it_is
    return _filtered if is_filtered(params, vocabulary) else _drawn


def _as_it_is(logits: Tensor, _sequences: list[Sequence], _eos: frozenset[int]) -> Tensor:
    return argmax(logits)


def _changed(logits: Tensor, sequences: list[Sequence], eos: frozenset[int]) -> Tensor:
    return argmax(adjust(logits.float(), sequences, eos))


def _drawn(logits: Tensor, sequences: list[Sequence], eos: frozenset[int]) -> Tensor:
    return draw(_tempered(logits, sequences, eos), _uniforms(sequences, logits.device))


def _filtered(logits: Tensor, sequences: list[Sequence], eos: frozenset[int]) -> Tensor:
    params = [s.prompt.params for s in sequences]
    return draw_filtered(_tempered(logits, sequences, eos), params, _uniforms(sequences, logits.device))


def _tempered(logits: Tensor, sequences: list[Sequence], eos: frozenset[int]) -> Tensor:
    logits = adjust(logits.float(), sequences, eos)
    temperatures = [s.prompt.params.temperature for s in sequences]
    return logits.div_(torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None])


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


def _uniforms(sequences: list[Sequence], device: torch.device) -> Tensor:
    columns = [(s.prompt.params.seed, s.prompt.line, s.sample, len(s.generated)) for s in sequences]
    return torch.from_numpy(uniform(*np.array(columns, dtype=np.int64).T)).to(device)
