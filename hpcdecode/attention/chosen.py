"""What indexers choose, in plain torch, which tests compare the native kernels with."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.shapes import IndexerShape


def index_dtype(kv_dtype: str) -> str:
    """Return the data type of index keys beside K and V of `kv_dtype`: of two bytes at least."""
    return kv_dtype if kv_dtype in ("float32", "float16") else "bfloat16"


def index_scores(queries: Tensor, keys: Tensor, shape: IndexerShape) -> Tensor:
    """Return the scores of L tokens for n queries, float32 [n, L].

    Args:
        queries: Index queries and head weights side by side, float32 [n, heads * (dim + 1)].
        keys: Index keys, float32 [L, dim].
        shape: Shape of the indexer.
    """
    q, weights = queries.split([shape.heads * shape.dim, shape.heads], 1)
    scores = torch.einsum("nhd,ld->nhl", q.unflatten(1, (shape.heads, shape.dim)), keys).relu()
    return torch.einsum("nhl,nh->nl", scores, weights)


def chosen_positions(queries: Tensor, keys: Tensor, shape: IndexerShape) -> Tensor:
    """Return the positions that the last n of L tokens attend to, booleans [n, L]; arguments of `index_scores`."""
    n, length = len(queries), len(keys)
    later = torch.arange(length)[None] > torch.arange(length - n, length)[:, None]
    scores = index_scores(queries, keys, shape).masked_fill(later, float("-inf"))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : shape.topk]  # of equal ones the first
    return torch.zeros(n, length, dtype=torch.bool).scatter(1, order, True) & ~later
