"""Attentions that bypass transformers' attention interface, while they are traced: BLOOM, Falcon, MPT and GPT-Neo.

Here they call it. Linear biases by distance (ALiBi; Press et al. 2022), of which transformers makes a tensor, are one
slope for every head (`ScoreRows`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from math import ceil, floor, log2
from typing import TYPE_CHECKING, Any

from hpcdecode.model.frontend.indexers import traced_positions
from hpcdecode.model.frontend.replaced_names import replaced_methods, replaced_names
from hpcdecode.model.frontend.score_rows import ScoreRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Attentions by the name of an implementation, in modules of transformers.
_TABLES = {
    "transformers.models.falcon.modeling_falcon": "FALCON_ATTENTION_CLASSES",
    "transformers.models.gpt_neo.modeling_gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
}


@contextlib.contextmanager
def known_as(implementation: str, model_class: type) -> Iterator[None]:
    """Let attentions have an implementation of this name inside the block, where a model is made that looks it up."""
    module = model_class.__module__
    table = getattr(sys.modules[module], _TABLES[module]) if module in _TABLES else {}
    if "eager" in table:
        table[implementation] = table["eager"]
    try:
        yield
    finally:
        table.pop(implementation, None)


@contextlib.contextmanager
def tracing_own_attentions(model: torch.nn.Module) -> Iterator[None]:
    """Let the attentions of `model`, of transformers, call the attention interface inside the block."""
    modules = list(model.modules())
    own = [m for m in modules if type(m).__name__ in _FORWARDS]

    def mask(name: str, _: object) -> object | None:
        return (lambda *_, **__: _NoMask()) if name == "create_causal_mask" else None

    with replaced_methods(own, _FORWARDS), replaced_names(own, mask):
        yield


class _NoMask:
    """Stands for a mask, which models convert before they hand it to their attentions."""

    ndim = 0

    def to(self, _: torch.dtype) -> _NoMask:
        """Return this mask."""
        return self


class _Caller:
    """What the interface reads of an attention's module: some have no config; dtype: of activations."""

    def __init__(self, dtype: torch.dtype):
        self.config, self.dtype = self, dtype


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return the attention [1, T, heads * dim] of q, k and v.

    Args:
        q: Queries, [1, q_heads, T, dim].
        k: Keys, [1, kv_heads, T, dim].
        v: Values, as k.
        scale: Factor of q.k.
        slopes: What minus the distance between query and key is multiplied by, for each head, and added, float64; None
            for 0.
        window: Positions that a query sees, or None for all.
    """
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from hpcdecode.model.frontend.ops import NAME

    scores = None
    if slopes is not None:
        exact = slopes.float()
        rounded = exact.bfloat16().float()  # and the rest, so that no data type of rows rounds slopes by much
        mixes = torch.stack([rounded, exact - rounded], -1).flatten()
        scores = ScoreRows(torch.zeros(2, 0), mixes + (0 * traced_positions())[:, None])
    about = {"scaling": scale, "sliding_window": window, "position_bias": scores}
    o, _ = ALL_ATTENTION_FUNCTIONS[NAME](_Caller(q.dtype), q, k, v, None, **about)
    attended: Tensor = o.reshape(1, q.shape[2], -1)
    return attended


def halving_slopes(heads: int) -> Tensor:
    """Return the slopes of BLOOM and Falcon: 2^(-8 i / n) for n heads, a power of two; others have those between.

    They are computed, float64 [heads], so that layers have no constants of their own.

    Args:
        heads: Number of query heads.
    """
    import torch

    count = 1 << floor(log2(heads))
    if count == heads:
        return _powers(count)
    between = torch.arange(1, 2 * (heads - count), 2, dtype=torch.float64) * (-4.0 / count)
    return torch.cat([_powers(count), between.exp2()])


def interleaved_slopes(heads: int) -> Tensor:
    """Return the slopes of MPT: 2^(-8 i / n), n the next power of two; of other numbers of heads every second first.

    Args:
        heads: Number of query heads.
    """
    count = 1 << ceil(log2(heads))
    import torch

    slopes = _powers(count)
    return slopes if count == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def _powers(count: int) -> Tensor:
    """Return 2^(-8 i / count) for i from 1 to `count`."""
    import torch

    powers: Tensor = (torch.arange(1, count + 1, dtype=torch.float64) * (-8.0 / count)).exp2()
    return powers


def _bloom(_: Callable[..., Any]) -> Callable[..., Any]:
    def attend(self: Any, hidden_states: Tensor, residual: Tensor, **_: object) -> tuple[Tensor, None]:
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        o = _attended(q, k, v, self.inv_norm_factor, halving_slopes(self.num_heads))
        return residual + self.dense(o), None

    return attend


def _falcon(_: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        self: Any, hidden_states: Tensor, alibi: Tensor | None, position_embeddings: Any = None, **_: object
    ) -> tuple[Tensor, None]:
        fused = self.query_key_value(hidden_states)
        if self.new_decoder_architecture:  # keys and values of a group lie behind its queries
            groups = fused.view(1, fused.shape[1], self.num_kv_heads, -1, self.head_dim)
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        elif self.multi_query:
            heads = fused.unflatten(-1, (-1, self.head_dim))
            q, k, v = heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
        else:
            q, k, v = self._split_heads(fused)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        slopes = None
        if alibi is None:
            rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
            q, k = rotate(q, k, *position_embeddings)
        else:
            slopes = halving_slopes(self.num_heads) * self.inv_norm_factor
        return self.dense(_attended(q, k, v, self.inv_norm_factor, slopes)), None

    return attend


def _mpt(_: Callable[..., Any]) -> Callable[..., Any]:
    def attend(self: Any, hidden_states: Tensor, position_bias: object, **_: object) -> tuple[Tensor, None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in fused.chunk(3, dim=-1))
        return self.out_proj(_attended(q, k, v, self.softmax_scale, interleaved_slopes(self.n_heads))), None

    return attend


def _gpt_neo(_: Callable[..., Any]) -> Callable[..., Any]:
    def attend(self: Any, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        rows = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in rows)
        window = self.config.window_size if self.attention_type == "local" else None
        return self.out_proj(_attended(q, k, v, 1.0, window=window)), None

    return attend


_FORWARDS = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "GPTNeoSelfAttention": _gpt_neo,
}
