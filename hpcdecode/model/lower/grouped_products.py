"""Layers of experts on a device: rows sorted by expert, and one grouped GEMM for all experts of a projection.

No operator reads a number back from the device, and all shapes follow from the numbers of tokens, choices and experts.
So nothing waits, torch.compile takes each operator as it is, and a CUDA graph can record it.

Rows [T, K, ...] are sorted if they lie in the order of their experts: row i of T * K is that of the (token, choice)
pair order[i]. Those whose expert has no weights here lie behind the others, and hold any numbers.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from hpcdecode.model.frontend.adapters import adapter_experts
from hpcdecode.model.lower.expert_blocks import by_blocks
from hpcdecode.model.lower.operators import define

BEHIND = 0x7FFF  # mask of keys: a number below 0 becomes one behind those of all experts
ALIGNED = 8  # bfloat16 numbers in 16 bytes, to which grouped_mm wants rows and matrices aligned
MOST_GROUPS = 1023
CAPABLE = (9, 10)  # major compute capabilities on which grouped_mm reads nothing back


def expert_order(expert: Tensor, experts: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by their experts; those of one expert stay in their order.

    Args:
        expert: The experts of each token, integers [T, K].
        experts: Number of experts that have weights here.
        first: Number of the first of them.

    Returns:
        The sorted experts less `first`, int16 [T, K], with numbers >= `experts` for those without weights; the pairs in
        that order, int64 [T, K]; and the end of each expert's run, int32 [experts].
    """
    key = expert.flatten() - first if first else expert.flatten()
    chosen, order = torch.sort(key.bitwise_and(BEHIND).to(torch.int16), stable=True)
    numbers = torch.arange(experts, dtype=torch.int16, device=expert.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    return chosen.view(expert.shape), order.view(expert.shape), ends


def expert_product(
    x: Tensor,
    chosen: Tensor,
    order: Tensor,
    ends: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
    is_sorted: bool,
) -> Tensor:
    """Apply the linear layers of experts to rows.

    Args:
        x: Sorted rows [T, K, in]; or rows in the order of tokens, [T, K, in] or [T, 1, in] for the same row for all
            choices.
        chosen: Sorted experts (see `expert_order`).
        order: Sorted pairs.
        ends: End of each expert's run.
        weight: Weights [E, out, in], or [E, in, out] if transposed.
        bias: Biases [E, out], or None.
        transposed: Whether `weight` is [E, in, out].
        is_sorted: Whether `x` is.

    Returns:
        Sorted rows [T, K, out].
    """
    rows, sorted_experts = x.flatten(0, 1), chosen.flatten()
    if not is_sorted:
        pair, each = order.flatten(), order.shape[1] // x.shape[1]
        rows = rows.index_select(0, pair if each == 1 else pair // each)
    if len(rows) == 0:
        return x.new_empty(*order.shape, weight.shape[2 if transposed else 1])
    if takes_grouped_mm(rows, weight):
        y = functional.grouped_mm(rows.contiguous(), weight if transposed else weight.mT, offs=ends)
    else:
        y = by_blocks(rows, weight, transposed, sorted_experts, ends)
    if bias is not None:
        y = y + bias.index_select(0, sorted_experts.clamp(max=len(bias) - 1).long())
    made: Tensor = y.unflatten(0, order.shape)
    return made


def rows_by_token(rows: Tensor, order: Tensor, ends: Tensor, whole: bool) -> Tensor:
    """Return sorted rows [T, K, out] in the order of tokens, with zeros for experts that have no weights here.

    Args:
        rows: The rows.
        order: Sorted pairs (see `expert_order`).
        ends: End of each expert's run.
        whole: Whether all experts have weights here.
    """
    flat = rows.flatten(0, 1)
    if not whole:
        number = torch.arange(len(flat), device=rows.device)
        flat = flat.masked_fill((number >= ends.narrow(0, len(ends) - 1, 1)).unsqueeze(1), 0)
    by_token: Tensor = flat.new_empty(flat.shape).index_copy_(0, order.flatten(), flat).unflatten(0, order.shape)
    return by_token


def takes_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped_mm multiplies without reading the ends of the runs back.

    Args:
        rows: Rows [rows, in].
        weight: Weights [E, out, in] or [E, in, out].
    """
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not is_capable(rows.device):
        return False
    aligned = not any(n % ALIGNED for n in (*weight.shape[1:], weight.storage_offset()))
    return aligned and len(weight) <= MOST_GROUPS and (weight.is_contiguous() or weight.mT.is_contiguous())


@functools.cache
def is_capable(device: torch.device) -> bool:
    """Return whether a GPU has kernels of grouped_mm."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in CAPABLE


def _ordered(expert: Tensor, experts: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen, order = (expert.new_empty(expert.shape, dtype=dtype) for dtype in (torch.int16, torch.int64))
    return chosen, order, expert.new_empty(experts, dtype=torch.int32)


def _multiplied(
    x: Tensor, chosen: Tensor, order: Tensor, ends: Tensor, weight: Tensor, bias: object, transposed: bool, _: bool
) -> Tensor:
    return x.new_empty(*order.shape, weight.shape[2 if transposed else 1])


EXPERT_ORDER = define(
    "expert_order(Tensor expert, int experts, int first) -> (Tensor, Tensor, Tensor)", expert_order, _ordered
)
EXPERT_PRODUCT = define(
    "expert_product(Tensor x, Tensor chosen, Tensor order, Tensor ends, Tensor weight, Tensor? bias, bool transposed, "
    "bool is_sorted) -> Tensor",
    expert_product,
    _multiplied,
)
ROWS_BY_TOKEN = define(
    "rows_by_token(Tensor rows, Tensor order, Tensor ends, bool whole) -> Tensor",
    rows_by_token,
    lambda rows, *_: rows.new_empty(rows.shape),
)
ADAPTER_EXPERTS = define(
    "adapter_experts(Tensor adapters, Tensor expert, int experts, int first) -> Tensor",
    adapter_experts,
    lambda adapters, expert, *_: adapters.new_empty(expert.shape),
)
