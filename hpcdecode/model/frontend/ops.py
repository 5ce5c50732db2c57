"""The operators that stand in for attention and for mixture-of-experts layers while a model is traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.rows import linear

NAME = "hpcdecode"  # of both implementations in transformers' registries

# Arguments transformers passes to an attention function that do not change its result for causal decoding.
HARMLESS = {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "layer_idx"}
HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}


@functools.cache
def register() -> None:
    """Define both operators, and enter them in transformers' registries, once."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    define()
    AttentionInterface.register(NAME, _attention)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


@functools.cache
def define() -> None:
    """Define `hpcdecode::attend` and `hpcdecode::expert_linear` for torch, once."""
    attend = torch.library.custom_op(
        "hpcdecode::attend",
        _attend_elsewhere,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v, int q_heads, int kv_heads, float scale, int? window, float? softcap, "
        "Tensor? sinks) -> Tensor",
    )
    attend.register_fake(
        lambda q, k, v, q_heads, kv_heads, *_: v.new_empty(v.shape[0], v.shape[1] // kv_heads * q_heads)
    )
    experts = torch.library.custom_op(
        "hpcdecode::expert_linear",
        expert_linear,
        mutates_args=(),
        schema="(Tensor x, Tensor expert, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    )
    experts.register_fake(
        lambda x, expert, weight, bias, transposed: x.new_empty(x.shape[0], weight.shape[2 - (not transposed)])
    )


def _attend_elsewhere(q, k, v, q_heads, kv_heads, scale, window, softcap, sinks):
    raise NotImplementedError("attend marks where a traced model is cut; it is never run")


def _attention(module, query, key, value, attention_mask, **kwargs):
    """transformers' attention signature, [1, heads, T, dim] in and [1, T, heads, v_dim] out, to one attend."""
    scale, window, softcap, sinks = (kwargs.pop(k, None) for k in ("scaling", "sliding_window", "softcap", "s_aux"))
    refuse_unknown_arguments(module, attention_mask, kwargs)
    dtype = module.config.dtype
    tokens, q_heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    q, k, v = (x.transpose(1, 2).reshape(tokens, -1).to(dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    o = torch.ops.hpcdecode.attend(q, k, v, q_heads, kv_heads, scale, window, softcap, sinks)
    return o.reshape(1, tokens, q_heads, value.shape[-1]).to(value.dtype), None


def refuse_unknown_arguments(module, attention_mask, kwargs: dict) -> None:
    """Raise UserError for whatever would change the result of attention and that attend does not carry."""
    name = type(module).__name__
    if attention_mask is not None:
        raise UserError(f"{name} builds an attention mask of its own, which the R-part does not apply: not supported")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UserError(f"{name} attends in both directions; only causal (decoder) attention is supported")
    for key, value in kwargs.items():
        if key not in HARMLESS and value is not None and value is not False:
            raise UserError(f"{name} passes {key!r} to its attention, which attend does not carry: not supported")


def _experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts signature: [T, hidden] and the router's [T, K] choices to [T, hidden].

    Every (token, choice) pair is computed, none is dropped, and a token's K parts are summed in the router's order.
    """
    k = top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)  # pairs grouped by expert
    x = hidden_states[torch.div(order, k, rounding_mode="floor")]
    bias = (lambda name: getattr(self, name)) if self.has_bias else (lambda name: None)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    x = torch.ops.hpcdecode.expert_linear(x, expert, getattr(self, up), bias(up + "_bias"), self.is_transposed)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = torch.ops.hpcdecode.expert_linear(x, expert, self.down_proj, bias("down_proj_bias"), self.is_transposed)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    x = x[torch.argsort(order)] * top_k_weights.reshape(-1, 1)
    return x.view(-1, k, x.shape[-1]).sum(1).to(hidden_states.dtype)


def expert_linear(
    x: Tensor, expert: Tensor, weight: Tensor | Sequence[Sequence[Tensor]], bias: Tensor | None, transposed: bool
) -> Tensor:
    """Apply to each row of `x` the linear layer of its expert; rows come sorted by expert.

    x [S, in], expert int64 [S]; weight [E, out, in] ([E, in, out] if transposed), or for each expert the [out_j, in]
    pieces that make it up along `out`, so that a checkpoint's tensors are used where they lie; bias [E, out] or None.
    """
    parts, start = [], 0
    used, counts = torch.unique_consecutive(expert, return_counts=True)
    for e, count in zip(used.tolist(), counts.tolist(), strict=True):
        rows = x[start : start + count]
        b = None if bias is None else bias[e]
        start += count
        if isinstance(weight, Tensor):
            parts.append(linear(rows, weight[e].t() if transposed else weight[e], b))
        else:
            y = [linear(rows, piece) for piece in weight[e]]
            y = y[0] if len(y) == 1 else torch.cat(y, -1)
            parts.append(y if b is None else y + b)
    if not parts:
        width = (
            weight.shape[2 if transposed else 1] if isinstance(weight, Tensor) else sum(p.shape[0] for p in weight[0])
        )
        return x.new_empty(0, width)
    return torch.cat(parts)
