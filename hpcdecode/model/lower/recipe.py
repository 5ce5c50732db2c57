"""How the weights that a compiled slice takes are made of the tensors of the checkpoint, once, at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcdecode.model.frontend.checkpoint import Stack
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.packed_weights import PRIVATE
from hpcdecode.system.shared_memory import WeightMemory

PACKED_FOR = 512  # tokens: oneDNN chooses the packed layout for this many, and it serves any number

Form = Literal["plain", "onednn", "packed", "packed gated", "onednn int8", "packed int8", "scales"]


@dataclass(frozen=True)
class Recipe:
    """How one weight of a compiled slice is made of those that the slice's graph named.

    Attributes:
        sources: Numbers of the weights that it is made of, stacked along their first dimension.
        transposed: True if the sources are [in, out].
        form: "plain", "onednn" (packed by oneDNN), "packed" (see packed_weights), or the scales of an int8 weight.
        biases: Numbers of the biases that its packed form begins with.
    """

    sources: tuple[int, ...]
    transposed: bool = False
    form: Form = "plain"
    biases: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return the numbers of all weights that `make_weight` takes."""
        return self.sources + self.biases


def make_weight(recipe: Recipe, tensors: Sequence[Tensor | Stack], memory: WeightMemory = PRIVATE) -> Tensor | Stack:
    """Return the weight of a recipe.

    Args:
        recipe: The recipe.
        tensors: The weights of its `inputs`. A stack of experts stays as it is.
        memory: Where to put packed weights.
    """
    if len(tensors) == 1 and isinstance(tensors[0], Stack):
        return tensors[0]
    plain = [as_tensor(t) for t in tensors]
    count = len(recipe.sources)
    parts = [w.t() for w in plain[:count]] if recipe.transposed else plain[:count]
    return _formed(recipe.form, parts, plain[count:], memory)


def _formed(form: Form, parts: list[Tensor], biases: list[Tensor], memory: WeightMemory) -> Tensor:
    if form == "packed":
        return packed_weights.pack(parts, _joined(biases) if biases else None, memory)
    if form == "packed gated":
        one, other = _two(parts)
        return packed_weights.pack_gated(one, other, _two(biases), memory)
    if form == "packed int8":
        return _rounded(parts, memory)
    whole = _joined(parts)
    if form == "onednn":
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), PACKED_FOR)
        return packed
    if form == "onednn int8":
        return quantize.pack(whole, PACKED_FOR)
    return quantize.output_scales(whole) if form == "scales" else whole


def _rounded(parts: list[Tensor], memory: WeightMemory) -> Tensor:
    """Return the packed int8 form of a weight [out, in] in parts."""

    def rows() -> packed_weights.WeightRows:
        whole = _joined(parts)
        return packed_weights.int8_rows(quantize.quantized(whole), quantize.output_scales(whole))

    words = parts[0].shape[1] // packed_weights.WORD.itemsize
    return packed_weights.packed(packed_weights.PackedSize(sum(map(len, parts)), words, 2), rows, memory)


def as_tensor(weight: Tensor | Stack) -> Tensor:
    """Return a weight that is one tensor.

    Raises:
        TypeError: If it is a stack of experts.
    """
    if isinstance(weight, Stack):
        raise TypeError("expected one tensor, got a stack of experts")
    return weight


def _two(tensors: list[Tensor]) -> list[Tensor]:
    """Return the halves of one tensor, or two tensors, or none, as they are."""
    return [part for t in tensors for part in t.chunk(2 // len(tensors))]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def packed_by_onednn(weight: Meta) -> bool:
    """Return True if oneDNN packs such weights on this machine."""
    if not quantize.has_onednn():
        return False
    if weight.dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32
