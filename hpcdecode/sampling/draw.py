"""One random token a row, from a distribution that temperature, min_p, top_k and top_p shape in this order.

A row's token depends on its logits, its parameters and its number in (0, 1) alone, never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from hpcdecode.sampling.params import SamplingParams

_BLOCK = 256  # tokens whose weights are first drawn from together
_BOUNDS = (128, 8192)  # most likely tokens to look at; all of them where these are not enough


def draw(logits: Tensor, params: Seq[SamplingParams], uniforms: Tensor) -> Tensor:
    """Token ids int64 [n] from float32 logits [n, vocab], which are overwritten, and float64 numbers [n] in (0, 1)."""
    logits /= _column(logits, [p.temperature for p in params])
    filtered = [0 < p.top_k < logits.shape[1] or p.top_p < 1 or p.min_p > 0 for p in params]
    if not any(filtered):
        return _draw_any(logits, uniforms)
    if not all(filtered):
        tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
        for some in (False, True):
            rows = [i for i, f in enumerate(filtered) if f is some]
            one = _draw_filtered if some else lambda part, _, numbers: _draw_any(part, numbers)
            tokens[rows] = one(logits[rows], [params[i] for i in rows], uniforms[rows])
        return tokens
    return _draw_filtered(logits, params, uniforms)


def _draw_any(logits: Tensor, uniforms: Tensor) -> Tensor:
    """From all tokens by the inverse of the distribution: first a block of them, then one in it."""
    weights = torch.softmax(logits, dim=-1)
    weights = _padded(weights, _BLOCK, 0.0).unflatten(1, (-1, _BLOCK))
    block, uniforms = _pick(weights.sum(dim=-1), uniforms)
    token, _ = _pick(weights[torch.arange(len(block), device=block.device), block], uniforms)
    return (block * _BLOCK + token).clamp_(max=logits.shape[1] - 1)


def _draw_filtered(logits: Tensor, params: Seq[SamplingParams], uniforms: Tensor) -> Tensor:
    """From the most likely tokens; rows for which a bound is not enough go on to the next."""
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(params), device=logits.device)
    for bound in (*(b for b in _BOUNDS if b < logits.shape[1]), logits.shape[1]):
        part, own = logits[rows], [params[i] for i in rows.tolist()]
        values, ids = largest(part, bound)
        weights, enough = _filter(part, values, ids, own)
        place, _ = _pick(weights, uniforms[rows])
        tokens[rows] = ids.gather(1, place[:, None]).squeeze(1)
        rows = rows[~enough]
        if not len(rows):
            break
    return tokens


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row in falling order, equal ones by token id, and their token ids.

    Of those equal to the last one, any may be among them.
    """
    vocabulary = logits.shape[1]
    if count >= vocabulary:
        return logits.sort(dim=-1, descending=True, stable=True)
    # Column j of a grid holds tokens j, j + width, ...: the `count` columns with the largest maxima hold them all.
    height = max(int((vocabulary / count) ** 0.5), 1)
    logits = _padded(logits, height, float("-inf"))
    width = logits.shape[1] // height
    if count < width:
        columns = logits.unflatten(1, (height, width)).amax(dim=1).topk(count, sorted=False).indices
        offsets = torch.arange(height, device=logits.device) * width
        ids = (columns[:, :, None] + offsets).flatten(1)
        ids = ids.gather(1, logits.gather(1, ids).topk(count, sorted=False).indices)
    else:
        ids = logits.topk(count, sorted=False).indices
    ids = ids.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _filter(logits: Tensor, values: Tensor, ids: Tensor, params: Seq[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Weights float64 [n, bound] of the largest logits, 0 where a filter excludes the token, and whether the bound is
    enough for each row: whether a token outside of it is excluded for certain."""
    bound, complete = values.shape[1], values.shape[1] == logits.shape[1]
    least = values[:, :1] + _column(values, [p.min_p for p in params]).log()
    top_k = [p.top_k if 0 < p.top_k < bound else bound for p in params]
    border = values.gather(1, torch.tensor(top_k, device=values.device)[:, None] - 1)
    cut = torch.tensor([p.min_p > 0 or 0 < p.top_k < logits.shape[1] for p in params], device=values.device)
    kept = (values >= least) & (values >= border)
    weights = torch.softmax(values.masked_fill(~kept, float("-inf")).double(), dim=-1)
    whole = ~cut
    if not complete and whole.any():  # top_p alone: its share is one of all tokens
        weights[whole] = torch.softmax(logits[whole], dim=-1).gather(1, ids[whole]).double()
    enough = whole | ~kept[:, -1]
    kept &= weights.cumsum(dim=-1) - weights < _column(weights, [p.top_p for p in params])
    last = values.gather(1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    enough &= (values[:, -1:] < last).squeeze(1)
    return weights * kept, enough | complete


def _pick(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of the weights [n, m] passes the share `uniforms` [n] of their total: the place [n], and
    the share of that weight [n] that was passed. A weight of 0 is never picked."""
    sums = weights.double().cumsum(dim=-1)
    total = sums[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, place).double()
    share = (target - (sums.gather(1, place) - weight)) / weight
    return place.squeeze(1), share.clamp_(0, 1).squeeze(1)


def _padded(rows: Tensor, multiple: int, value: float) -> Tensor:
    lacking = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, lacking), value=value) if lacking else rows


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
