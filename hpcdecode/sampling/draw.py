"""One random token for each row of logits, from the tokens that min_p, top_k and top_p leave, in this order.

Tokens are added up by their ids until the running sum of weights passes a share of their total, a random number in
(0, 1); that token is drawn. A row's token depends on its logits, its parameters and its random number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

import torch
from torch import Tensor

from hpcdecode import _ops_cpu
from hpcdecode.attention.base import isa
from hpcdecode.requests.params import SamplingParams
from hpcdecode.sampling.rows import rows_of, values_on
from hpcdecode.system.uploads import upload

_BLOCK = 256  # tokens of a block; a block is drawn first, then a token in it
_BOUNDS = (64, 1024, 16384)  # numbers of most likely tokens to consider, until one is enough

_AT_ONCE = 1 << 26  # logits of a device that are worked on at once
_LEAST_TEMPERATURE = 1e-30  # logits over less may be infinite; over this one, only the largest have any weight

_TYPES = {torch.float32: _ops_cpu.Type.float32, torch.bfloat16: _ops_cpu.Type.bfloat16}


def draw(logits: Tensor, rows: list[int], params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Return one token id for each of `rows`, int64 [n].

    Args:
        logits: [m, vocab], of any float dtype.
        rows: [n], indices of rows of logits.
        params: [n], whose temperatures are not 0.
        uniforms: Random numbers in (0, 1), float64 [n].
    """
    if logits.device.type != "cpu":
        (own,) = upload(logits.device, uniforms.numpy())
        return draw_by_torch(rows_of(logits, rows), params, own)
    logits = logits if logits.dtype in _TYPES and logits.stride(1) == 1 else logits.float().contiguous()
    asked = zip(params, uniforms.tolist(), strict=True)
    draws = [_ops_cpu.Draw(_temperature(p), p.min_p, max(p.top_k, 0), p.top_p, u) for p, u in asked]
    place = logits.data_ptr(), logits.stride(0) * logits.element_size(), _TYPES[logits.dtype], logits.shape[1]
    return torch.tensor(_ops_cpu.draw(*place, rows, draws, torch.get_num_threads(), isa()))


def draw_by_torch(logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Return one token id for each row of logits [n, vocab], as `draw`, on any device.

    The device is waited for once for each number of most likely tokens that is considered.
    """
    some = max(_AT_ONCE // logits.shape[1], 1)
    parts = [slice(start, start + some) for start in range(0, len(params), some)]
    return torch.cat([_draw_some(logits[part].float(), params[part], uniforms[part]) for part in parts])


def _draw_some(logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    logits = logits / _column(logits, list(map(_temperature, params)))
    ways = [_way(p, logits.shape[1]) for p in params]
    order, tokens = [], []
    for way in (_draw_from_all, _draw_from_top, _draw_from_share):
        if rows := [i for i, own in enumerate(ways) if own is way]:
            order += rows
            tokens.append(way(rows_of(logits, rows), [params[i] for i in rows], rows_of(uniforms, rows)))
    if len(tokens) == 1:
        return tokens[0]
    places = {row: place for place, row in enumerate(order)}
    return rows_of(torch.cat(tokens), [places[row] for row in range(len(params))])


def _temperature(params: SamplingParams) -> float:
    return max(params.temperature, _LEAST_TEMPERATURE)


def _way(params: SamplingParams, vocabulary: int) -> Callable[[Tensor, Sequence[SamplingParams], Tensor], Tensor]:
    """Return the function that draws for a row of these parameters."""
    if params.min_p > 0 or 0 < params.top_k < vocabulary:
        return _draw_from_top
    return _draw_from_share if params.top_p < 1 else _draw_from_all


def _draw_from_all(logits: Tensor, _params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Draw a block of tokens, then a token in it."""
    blocks = _padded(torch.softmax(logits, dim=-1), _BLOCK, 0.0).unflatten(1, (-1, _BLOCK))
    block, uniforms = _pick(blocks.sum(dim=-1), uniforms)
    token, _ = _pick(blocks[torch.arange(len(block), device=block.device), block], uniforms)
    return (block * _BLOCK + token).clamp_(max=logits.shape[1] - 1)


def _draw_from_top(logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Draw for rows with min_p or top_k, where top_p is a share of what these leave."""
    return _draw_from_largest(logits, params, uniforms, None)


def _draw_from_share(logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Draw for rows with top_p alone, which is a share of all tokens."""
    return _draw_from_largest(logits, params, uniforms, torch.softmax(logits, dim=-1))


def _draw_from_largest(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor, weights: Tensor | None
) -> Tensor:
    """Draw from the largest logits only; a row for which they are not enough goes on to more of them."""
    rows = list(range(len(params)))
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for bound in (*(b for b in _BOUNDS if b < logits.shape[1]), logits.shape[1]):
        complete = bound == logits.shape[1]
        values, ids = largest(logits, bound)
        own = None if weights is None else weights.gather(1, ids)
        kept, enough = _filter(values, own, [params[i] for i in rows], complete)
        ids, order = ids.sort(dim=-1)
        place, _ = _pick(kept.gather(1, order), uniforms)
        found = ids.gather(1, place[:, None]).squeeze(1)
        tokens = found if len(rows) == len(params) else tokens.index_copy(0, _index(found, rows), found)
        more = [] if complete else [i for i, is_enough in enumerate(enough.tolist()) if not is_enough]
        if not more:
            break
        rows = [rows[i] for i in more]
        logits, uniforms = rows_of(logits, more), rows_of(uniforms, more)
        weights = None if weights is None else rows_of(weights, more)
    return tokens


def _index(like: Tensor, rows: Sequence[int]) -> Tensor:
    """Return numbers of rows on the device of `like`."""
    return values_on(like.device, rows, torch.int64)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of each row in falling order, and their token ids.

    Equal logits come by token id. Of those equal to the last one, any may be among them.
    """
    vocabulary = logits.shape[1]
    if count >= vocabulary:
        return logits.sort(dim=-1, descending=True, stable=True)
    # Column j of a grid holds tokens j, j + width, ...: the `count` columns with the largest maxima hold them all.
    height = 1 << round(log2(vocabulary / count) / 2)
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
    return values, ids.gather(1, order).clamp_(max=vocabulary - 1)


def _filter(
    values: Tensor, weights: Tensor | None, params: Sequence[SamplingParams], complete: bool
) -> tuple[Tensor, Tensor]:
    """Return what the filters leave of the largest logits.

    Args:
        values: Largest logits of each row, [n, bound], in falling order.
        weights: Probabilities among all tokens, [n, bound], for rows with top_p alone; None for other rows.
        params: [n].
        complete: True if no token is outside of values.

    Returns:
        Weights float64 [n, bound], 0 for an excluded token, and for each row whether every token outside is excluded.
    """
    bound = values.shape[1]
    top_k = [p.top_k if 0 < p.top_k < bound else bound for p in params]
    border = values.gather(1, _index(values, top_k)[:, None] - 1)
    least = values[:, :1] + _column(values, [p.min_p for p in params]).log()
    kept = (values >= border) & (values >= least) & (values > float("-inf"))
    enough = ~kept[:, -1] if weights is None else torch.ones_like(kept[:, -1])
    if weights is None:
        weights = torch.softmax(values.masked_fill(~kept, float("-inf")).double(), dim=-1)
    weights = weights.double()
    kept &= weights.cumsum(dim=-1) - weights < _column(weights, [p.top_p for p in params])
    last = values.gather(1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    enough &= (values[:, -1:] < last).squeeze(1)
    return weights * kept, enough | complete


def _pick(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the running sum of weights passes a share of their total. A weight of 0 is never picked.

    Args:
        weights: [n, m].
        uniforms: Shares in (0, 1), [n].

    Returns:
        The place [n], and the share of that weight [n] that was passed.
    """
    sums = weights.double().cumsum(dim=-1)
    total = sums[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, place).double()
    share = (target - (sums.gather(1, place) - weight)) / weight
    return place.squeeze(1), share.clamp_(0, 1).squeeze(1)


def _padded(rows: Tensor, multiple: int, value: float) -> Tensor:
    """Return rows [n, m] with m padded to a multiple."""
    lacking = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, lacking), value=value) if lacking else rows


def _column(like: Tensor, values: list[float]) -> Tensor:
    """Return values as a column [n, 1] of the dtype and device of `like`."""
    return values_on(like.device, values, like.dtype)[:, None]
