"""Logits to tokens: greedy, temperature, top_k and top_p, one draw a token by the inverse of the distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from hpcdecode.sampling.philox import uniform
from hpcdecode.schedule.sequence import Sequence


def sample(logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
    """The next token of each sequence from its row of logits [n, vocab], of any float dtype.

    Filters apply in vLLM's order: temperature, top_k, top_p. The draw depends on (seed, row, sample, position)
    alone, so the same logits give the same token however the job is split.
    """
    tokens = _greedy(logits)
    random = [i for i, s in enumerate(sequences) if s.prompt.params.temperature > 0]
    if random:
        index = torch.tensor(random, device=logits.device)
        tokens[index] = _draw(logits[index].float(), [sequences[i] for i in random])
    return tokens.tolist()


def _greedy(logits: Tensor) -> Tensor:
    """The first largest logit of each row; on the CPU by numpy, whose search is several times as fast as torch's."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    params = [s.prompt.params for s in sequences]
    column = {"device": logits.device, "dtype": torch.float32}
    logits = logits / torch.tensor([p.temperature for p in params], **column)[:, None]
    if any(0 < p.top_k < logits.shape[1] or p.top_p < 1 for p in params):
        logits = _filter(logits, [p.top_k for p in params], torch.tensor([p.top_p for p in params], **column))
    weights = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    target = torch.from_numpy(_uniforms(sequences)).to(logits.device)[:, None] * weights[:, -1:]
    drawn = torch.searchsorted(weights, target, right=True)
    return drawn.clamp_(max=logits.shape[1] - 1).squeeze(1)


def _uniforms(sequences: list[Sequence]) -> np.ndarray:
    columns = [(s.prompt.params.seed, s.prompt.line, s.sample, len(s.generated)) for s in sequences]
    return uniform(*np.array(columns, dtype=np.int64).T)


def _filter(logits: Tensor, top_k: list[int], top_p: Tensor) -> Tensor:
    """Set the logits of the tokens that top_k or top_p exclude to -inf. Ties at the border are kept by token id."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[1]
    keep = torch.tensor([k if k > 0 else vocabulary for k in top_k], device=logits.device)[:, None]
    outside = torch.arange(vocabulary, device=logits.device)[None, :] >= keep
    ordered = ordered.masked_fill(outside, float("-inf"))
    weights = torch.softmax(ordered.double(), dim=-1)
    before = weights.cumsum(dim=-1) - weights
    ordered = ordered.masked_fill(before >= top_p.double()[:, None], float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)
