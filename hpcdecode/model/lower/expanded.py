"""Weights in few bits on a device: packed as for CPUs, and expanded to a matrix when a projection takes them.

Memory holds the few bits of all layers, and one matrix at a time. Expanding reads a weight's bits and writes it once;
the GEMM is torch's own, so results are, bit for bit, those of the expanded weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from hpcdecode.attention.cuda import CudaModule, native, stream_of
from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.lower.few_bits import ALL_FORMS, HALVES
from hpcdecode.model.lower.operators import define
from hpcdecode.model.lower.packed_weights import PackedSize
from hpcdecode.model.lower.projections import Projection
from hpcdecode.model.lower.recipe import Form, Recipe
from hpcdecode.model.lower.weight_graph import WeightGraph

aten = torch.ops.aten
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def expands(bits: str | None, inputs: int, dtype: torch.dtype) -> bool:
    """Return whether weights of a form can be expanded.

    Args:
        bits: The form, one of ALL_FORMS, "int8" or None.
        inputs: Their inputs.
        dtype: Of the matrix.
    """
    form = ALL_FORMS.get(bits or "")
    return form is not None and form.native not in HALVES and inputs % form.multiple == 0 and dtype in DTYPES


def expand(packed: Tensor, form: int, experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return matrices below each other, [experts * outputs, inputs].

    Args:
        packed: Weights as `packed_weights.pack_few_bits` makes them, one expert after the other.
        form: Value of their WeightForm.
        experts: Number of them.
        outputs: Outputs of each.
        inputs: Inputs.
        dtype: float32 or bfloat16.
    """
    made, device = _like(packed, form, experts, outputs, inputs, dtype), packed.device
    size, at = (experts, outputs, inputs), (packed.data_ptr(), made.data_ptr())
    _module(device).expand_weights(form, *at, DTYPES[dtype], *size, device.index or 0, stream_of(device))
    return made


@functools.cache
def _module(device: torch.device) -> CudaModule:
    """Return the module that has the kernels for a device, which is looked for once."""
    return native(device)


def _like(packed: Tensor, _: int, experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(experts * outputs, inputs, dtype=dtype)


EXPAND = define(
    "expand(Tensor packed, int form, int experts, int outputs, int inputs, ScalarType dtype) -> Tensor", expand, _like
)


def expandable(p: Projection, bits: str | None) -> str | None:
    """Return the form of a projection's weights, one of ALL_FORMS, if they can be expanded in it; else None."""
    return bits if expands(bits, tensor_meta(p.x).one_token[-1], tensor_meta(p.weight).dtype) else None


def expanded_weight(made: WeightGraph, group: Sequence[Projection], bits: str) -> fx.Node:
    """Add the weight of projections in few bits, and the call that expands it where the graph inserts.

    Args:
        made: The graph.
        group: Projections of one input; or one by experts.
        bits: Form of the weight, one of ALL_FORMS.

    Returns:
        The node of the matrix [out, in], or of those [E, out, in] of experts.
    """
    about, form = tensor_meta(group[0].weight), ALL_FORMS[bits]
    inputs, outputs = tensor_meta(group[0].x).one_token[-1], sum(p.width for p in group)
    by_experts = len(about.shape) == 3
    experts = about.one_token[0] if by_experts else 1
    kind: Form = "packed experts" if by_experts else "packed"
    sources, size = made.sources(p.weight for p in group), PackedSize(outputs, form.words(inputs), 1, experts)
    packed = made.input(Recipe(sources, group[0].transposed, kind, packed=size, bits=bits))
    args = (packed, form.native.value, experts, outputs, inputs, about.dtype)
    matrix = made.call(EXPAND, args, Meta.of(about.dtype, (experts * outputs, inputs)))
    if not by_experts:
        return matrix
    shape = [experts, outputs, inputs]
    return made.call(aten.reshape.default, (matrix, shape), Meta.of(about.dtype, tuple(shape)))
