"""The operators that stand for attention, a layer of experts, and a sum over the members of a group in a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.nodes import as_float, as_int, as_node
from hpcdecode.model.frontend.rows import linear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "hpcdecode"  # of both implementations in transformers' registries

# Arguments transformers passes to an attention function that do not change its result for causal decoding.
HARMLESS = {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "layer_idx"}
HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
HARMLESS |= {"logits_to_keep"}


class AttentionModule(Protocol):
    """What is read of a transformers attention module."""

    config: PreTrainedConfig


class ExpertsModule(Protocol):
    """What is read of a transformers module of experts, besides its weights."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]


class AttendArguments(NamedTuple):
    """Arguments of `hpcdecode::attend`.

    Attributes:
        q: Queries, [T, q_heads * k_dim].
        k: Keys, [T, kv_heads * k_dim].
        v: Values, [T, kv_heads * v_dim], or no columns if they are the first columns of k.
        q_heads: Number of query heads.
        kv_heads: Number of KV heads.
        scale: Factor of q.k.
        window: Number of positions that a token sees, itself included; None for all.
        softcap: Limit of the scores, or None.
        sinks: One logit per query head, [q_heads], or None.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    q_heads: int
    kv_heads: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: fx.Node | None

    @classmethod
    def of(cls, attend: fx.Node) -> AttendArguments:
        """Return the arguments of the call `attend`."""
        q, k, v, q_heads, kv_heads, scale, window, softcap, sinks = attend.args
        return cls(
            q=as_node(q),
            k=as_node(k),
            v=as_node(v),
            q_heads=as_int(q_heads),
            kv_heads=as_int(kv_heads),
            scale=as_float(scale),
            window=None if window is None else as_int(window),
            softcap=None if softcap is None else as_float(softcap),
            sinks=None if sinks is None else as_node(sinks),
        )


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
    """Define `hpcdecode::attend`, `hpcdecode::expert_linear` and `hpcdecode::member_sum` for torch, once."""
    attend = torch.library.custom_op(
        "hpcdecode::attend",
        _attend_elsewhere,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v, int q_heads, int kv_heads, float scale, int? window, float? softcap, "
        "Tensor? sinks) -> Tensor",
    )
    attend.register_fake(_attended)
    experts = torch.library.custom_op(
        "hpcdecode::expert_linear",
        expert_linear,
        mutates_args=(),
        schema="(Tensor x, Tensor expert, Tensor weight, Tensor? bias, bool transposed, int first=0) -> Tensor",
    )
    experts.register_fake(_projected)
    member_sum = torch.library.custom_op(
        "hpcdecode::member_sum", _summed_elsewhere, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    member_sum.register_fake(torch.empty_like)


def _attend_elsewhere(*_: object) -> Tensor:
    raise NotImplementedError("attend marks where a traced model is cut; it is never run")


def _summed_elsewhere(*_: object) -> Tensor:
    raise NotImplementedError("member_sum marks where the members of a group add up; it is never run")


def _attended(q: Tensor, k: Tensor, v: Tensor, q_heads: int, kv_heads: int, *_: object) -> Tensor:
    return v.new_empty(v.shape[0], v.shape[1] // kv_heads * q_heads)


def _projected(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int = 0
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 - (not transposed)])


def _attention(
    module: AttentionModule, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call attend with the arguments of transformers' attention interface.

    Args:
        module: Attention module of the layer.
        query: Queries, [1, q_heads, T, k_dim].
        key: Keys, [1, kv_heads, T, k_dim].
        value: Values, [1, kv_heads, T, v_dim].
        attention_mask: A mask other than None is refused.
        kwargs: Scale, window, softcap and sinks, and what some models pass besides.

    Returns:
        The output [1, T, q_heads, v_dim], and None for the attention weights.
    """
    scale, window, softcap, sinks = (kwargs.pop(k, None) for k in ("scaling", "sliding_window", "softcap", "s_aux"))
    refuse_unknown_arguments(module, attention_mask, kwargs)
    dtype = module.config.dtype
    tokens, q_heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    q, k, v = (x.transpose(1, 2).reshape(tokens, -1).to(dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    o: Tensor = torch.ops.hpcdecode.attend(q, k, v, q_heads, kv_heads, scale, window, softcap, sinks)
    return o.reshape(1, tokens, q_heads, value.shape[-1]).to(value.dtype), None


def refuse_unknown_arguments(module: AttentionModule, attention_mask: object, kwargs: Mapping[str, object]) -> None:
    """Raise UserError if an argument would change the result of attention and attend does not take it."""
    name = type(module).__name__
    if attention_mask is not None:
        raise UserError(f"{name} builds an attention mask of its own, which the R-part does not apply: not supported")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UserError(f"{name} attends in both directions; only causal (decoder) attention is supported")
    for key, value in kwargs.items():
        if key not in HARMLESS and value is not None and value is not False:
            raise UserError(f"{name} passes {key!r} to its attention, which attend does not carry: not supported")


def _experts(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a layer of experts by `expert_linear`, with the arguments of transformers' experts interface.

    No (token, choice) pair is dropped. A token's K results are summed in the router's order.

    Args:
        self: The module of the experts.
        hidden_states: Input, [T, hidden].
        top_k_index: The router's choice of experts, [T, K].
        top_k_weights: The weight of each choice, [T, K].

    Returns:
        [T, hidden].
    """
    k = top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)  # pairs grouped by expert
    x = hidden_states[torch.div(order, k, rounding_mode="floor")]
    up = "gate_up_proj" if self.has_gate else "up_proj"
    x = _expert_projection(self, up, x, expert)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _expert_projection(self, "down_proj", x, expert)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    x = x[torch.argsort(order)] * top_k_weights.reshape(-1, 1)
    return x.view(-1, k, x.shape[-1]).sum(1).to(hidden_states.dtype)


def _expert_projection(module: ExpertsModule, name: str, x: Tensor, expert: Tensor) -> Tensor:
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    out: Tensor = torch.ops.hpcdecode.expert_linear(x, expert, weight, bias, module.is_transposed)
    return out


def expert_linear(
    x: Tensor,
    expert: Tensor,
    weight: Tensor | Sequence[Sequence[Tensor]],
    bias: Tensor | None,
    transposed: bool,
    first: int = 0,
) -> Tensor:
    """Apply to each row of `x` the linear layer of its expert. Rows of experts without weights here become zeros.

    Args:
        x: Input, [S, in], sorted by expert.
        expert: The expert of each row, int64 [S].
        weight: Weights of experts `first` to `first + E - 1`, [E, out, in], or [E, in, out] if transposed. Or for each
            of them the [out_j, in] pieces that make it up along `out`, so that a checkpoint's tensors need no copy.
        bias: Biases of the same experts, [E, out], or None.
        transposed: Whether `weight` is [E, in, out].
        first: Number of the first expert that has weights here.

    Returns:
        [S, out].
    """
    if isinstance(weight, Tensor):
        outputs = weight.shape[2 if transposed else 1]
    else:
        outputs = sum(piece.shape[0] for piece in weight[0])
    parts: list[Tensor] = []
    before = start = 0  # rows of experts before the first, and rows so far of these and of those with weights
    used, counts = torch.unique_consecutive(expert, return_counts=True)
    for e, count in zip(used.tolist(), counts.tolist(), strict=True):
        if e >= first + len(weight):
            break
        if e < first:
            before += count
        else:
            b = None if bias is None else bias[e - first]
            parts.append(_of_one_expert(x[start : start + count], weight[e - first], b, transposed))
        start += count
    if before:
        parts.insert(0, x.new_zeros(before, outputs))
    if start < len(x) or not parts:
        parts.append(x.new_zeros(len(x) - start, outputs))
    return torch.cat(parts)


def _of_one_expert(x: Tensor, weight: Tensor | Sequence[Tensor], bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the linear layer of one expert, of rows [S, in]: [S, out]."""
    if isinstance(weight, Tensor):
        return linear(x, weight.t() if transposed else weight, bias)
    pieces = [linear(x, piece) for piece in weight]
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
    return y if bias is None else y + bias
