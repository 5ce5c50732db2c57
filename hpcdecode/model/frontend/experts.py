"""Layers of experts: each token is multiplied by the weights of the K experts that a router chose for it.

Rows stay in the order of tokens, [T, K, ...]: whatever reads them is element by element, and grouping rows by expert is
the affair of what multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcdecode.model.frontend.rows import linear


class ExpertsModule(Protocol):
    """What is read of a transformers module of experts, besides its weights."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]


def run_experts(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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
    x = _projection(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states[:, None], top_k_index)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _projection(self, "down_proj", x, top_k_index)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    return (x * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _projection(module: ExpertsModule, name: str, x: Tensor, expert: Tensor) -> Tensor:
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    out: Tensor = torch.ops.hpcdecode.expert_linear(x, expert, weight, bias, module.is_transposed)
    return out


def projected(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int = 0
) -> Tensor:
    """Return an empty tensor like the result of `expert_linear`."""
    return x.new_empty(*expert.shape, weight.shape[2 - (not transposed)])


def expert_linear(
    x: Tensor,
    expert: Tensor,
    weight: Tensor | Sequence[Sequence[Tensor]],
    bias: Tensor | None,
    transposed: bool,
    first: int = 0,
) -> Tensor:
    """Apply to rows of `x` the linear layers of experts. Where an expert has no weights here, the result is zeros.

    Args:
        x: Input, [T, K, in], or [T, 1, in] for the same row for all choices.
        expert: The experts of each token, int64 [T, K].
        weight: Weights of experts `first` to `first + E - 1`, [E, out, in], or [E, in, out] if transposed. Or for each
            of them the [out_j, in] pieces that make it up along `out`, so that a checkpoint's tensors need no copy.
        bias: Biases of the same experts, [E, out], or None.
        transposed: Whether `weight` is [E, in, out].
        first: Number of the first expert that has weights here.

    Returns:
        [T, K, out].
    """
    if isinstance(weight, Tensor):
        outputs = weight.shape[2 if transposed else 1]
    else:
        outputs = sum(piece.shape[0] for piece in weight[0])
    each = expert.shape[1] // x.shape[1]  # choices that read one row
    x = x.flatten(0, 1)
    of_rows, order = torch.sort(expert.flatten(), stable=True)
    used, counts = torch.unique_consecutive(of_rows, return_counts=True)
    y, start = x.new_zeros(len(order), outputs), 0
    for e, count in zip(used.tolist(), counts.tolist(), strict=True):
        rows = order[start : start + count]
        start += count
        if first <= e < first + len(weight):
            b = None if bias is None else bias[e - first]
            y[rows] = _of_one_expert(x[rows // each], weight[e - first], b, transposed)
    made: Tensor = y.unflatten(0, expert.shape)
    return made


def _of_one_expert(x: Tensor, weight: Tensor | Sequence[Tensor], bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the linear layer of one expert, of rows [S, in]: [S, out]."""
    if isinstance(weight, Tensor):
        return linear(x, weight.t() if transposed else weight, bias)
    pieces = [linear(x, piece) for piece in weight]
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
    return y if bias is None else y + bias
