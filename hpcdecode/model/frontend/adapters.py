"""LoRA adapters that stay apart from the weights: each token is updated by the adapter of its own sequence.

A projection y = W x of the trace becomes y + B_a (A_a x) for tokens that have an adapter a. All adapters' A lie in one
tensor, and all B, with zeros where an adapter has a lower rank or does not update the weight. Every expert has an A and
a B. A member of a group that has some outputs of W has those of B; one that has some inputs has those of A, and the sum
over members adds up all; one that has some experts has their A and B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.trace import Trace

ROWS_AT_ONCE = 16


def lora_update(y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y + B_a (A_a x) for tokens that have an adapter a, and y for the others.

    A token's bits do not depend on others: sums are those of single rows on CPUs.

    Args:
        y: Result of a projection, [..., T, out] without other tokens.
        x: Its input, [..., T, in].
        adapters: The tokens' adapters, int64 [T], -1 for none.
        a: A of every adapter, [adapters, rank, in].
        b: B of every adapter times its scale, [adapters, out, rank].
    """
    made, rows = y.reshape(len(adapters), -1).clone(), x.reshape(len(adapters), -1)
    for adapter in adapters.unique().tolist():
        if adapter < 0:
            continue
        chosen = (adapters == adapter).nonzero()[:, 0]
        made[chosen] += _linear(_linear(rows[chosen], a[adapter]), b[adapter])
    return made.view(y.shape)


def expert_lora_update(
    y: Tensor, x: Tensor, adapters: Tensor, expert: Tensor, a: Tensor, b: Tensor, experts: int, first: int
) -> Tensor:
    """Return y + B (A x), by the factors that a token's adapter has for the expert of a row; y where it has none.

    Args:
        y: Result of a projection by experts, [T, K, out].
        x: Its input, [T, K, in], or [T, 1, in] for the same row for all choices.
        adapters: The tokens' adapters, int64 [T], -1 for none.
        expert: The experts of each token, int64 [T, K].
        a: A of experts `first` to `first + experts - 1` of every adapter, [adapters * experts, rank, in].
        b: B of the same times its scale, [adapters * experts, out, rank].
        experts: Number of experts that have weights here.
        first: Number of the first of them.
    """
    number = adapter_experts(adapters, expert, experts, first)
    low = expert_linear(x, number, a, None, False, 0)
    return y + expert_linear(low, number, b, None, False, 0)


def adapter_experts(adapters: Tensor, expert: Tensor, experts: int, first: int) -> Tensor:
    """Return where the factors of a token's adapter for its experts lie, [T, K], or -1 where there are none.

    Arguments are those of `expert_lora_update`.
    """
    own = expert - first
    none = (adapters < 0)[:, None] | (own < 0) | (own >= experts)
    return (adapters[:, None] * experts + own).masked_fill(none, -1)


def with_numbers(trace: Trace, context: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the context of the first slice; if the model has adapters and no token has any, with -1 for each."""
    if trace.adapters is None or len(context) == len(trace.step_inputs):
        return context
    return *context, torch.full_like(context[0], -1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, on CPUs with sums of each row by itself."""
    if x.device.type != "cpu":
        return x @ weight.t()
    wide = weight.float()
    parts = [(part[:, None] * wide).sum(-1) for part in x.float().split(ROWS_AT_ONCE)]
    return torch.cat(parts).to(x.dtype)
