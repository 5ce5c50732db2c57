"""How the weights that a compiled slice takes are made of the tensors of the checkpoint, once, at load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.few_bits import ALL_FORMS
from hpcdecode.model.lower.packed_weights import PRIVATE, PackedSize, WeightRows
from hpcdecode.system.shared_memory import WeightMemory

PACKED_FOR = 512  # tokens: oneDNN chooses the packed layout for this many, and it serves any number


BlocksBy = Literal["row", "column", None]  # of a weight [out, in] or [in, out]; None for numbers


class ReadWeight(Protocol):
    """What returns a weight that a slice's graph named."""

    def __call__(self, number: int, blocks: BlocksBy = None, /) -> Tensor | Stack:
        """Return the weight of a number, or the blocks that hold it, uint8 [out, bytes]."""


Form = Literal[
    "plain",
    "experts",
    "onednn",
    "packed",
    "packed gated",
    "packed heads",
    "packed experts",
    "packed gated experts",
    "packed int8 experts",
    "onednn int8",
    "packed int8",
    "packed lora a",
    "packed lora b",
    "packed gated lora b",
    "scales",
]


@dataclass(frozen=True)
class Recipe:
    """How one weight of a compiled slice is made of those that the slice's graph named.

    Attributes:
        sources: Numbers of the weights that it is made of, stacked along their first dimension.
        transposed: True if the sources are [in, out].
        form: "plain", "experts" (as one tensor), "onednn" (packed by oneDNN), "packed" (see packed_weights), or the
            scales of an int8 weight.
        biases: Numbers of the biases that its packed form begins with.
        packed: Size of its packed form, or None if it has another.
        bits: Form in few bits of a packed weight, one of few_bits.ALL_FORMS, or None.
        parts: Of B of adapters (LoRA): outputs and rank of every projection that it updates; rank 0 for those that it
            leaves as they are, which have no source.
        wide: True if the sources become float32.
    """

    sources: tuple[int, ...]
    transposed: bool = False
    form: Form = "plain"
    biases: tuple[int, ...] = ()
    packed: PackedSize | None = None
    bits: str | None = None
    parts: tuple[tuple[int, int], ...] = ()
    wide: bool = False


MadeBefore = Callable[[Recipe], Tensor | Stack | None]


def make_weight(recipe: Recipe, read: ReadWeight, memory: WeightMemory = PRIVATE) -> Tensor | Stack:
    """Return the weight of a recipe.

    Args:
        recipe: The recipe.
        read: Returns a weight that the slice's graph named, by number. A stack of experts that is not packed stays as
            it is.
        memory: Where to put packed weights.
    """
    if recipe.packed is not None:
        return packed_weights.packed(recipe.packed, lambda: _rows(recipe, read), memory, recipe.bits)
    only = read(recipe.sources[0])
    if isinstance(only, Stack):
        return only.whole() if recipe.form == "experts" else only.held()
    whole = _joined(_parts(recipe, read))
    if recipe.form == "onednn":
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), PACKED_FOR)
        return packed
    if recipe.form == "onednn int8":
        return quantize.onednn_packed(quantize.RoundedWeight.of(whole).weight, PACKED_FOR)
    return quantize.RoundedWeight.of(whole).scales if recipe.form == "scales" else whole


def _blocks(recipe: Recipe) -> BlocksBy:
    """Return which blocks a recipe's weight is packed from, or None."""
    if recipe.bits is None or ALL_FORMS[recipe.bits].block is None:
        return None
    return "column" if recipe.transposed else "row"


def _sources(recipe: Recipe, read: ReadWeight) -> list[Tensor | Stack]:
    """Return the weights that a recipe's is made of, or blocks of them."""
    blocks = _blocks(recipe)
    return [read(i) if blocks is None else read(i, blocks) for i in recipe.sources]


def _parts(recipe: Recipe, read: ReadWeight) -> list[Tensor]:
    """Return the parts [out_i, in] of a recipe's weight, or blocks of them."""
    parts = [as_tensor(each) for each in _sources(recipe, read)]
    parts = [part.float() for part in parts] if recipe.wide else parts
    return _turned(recipe, parts)


def _turned(recipe: Recipe, parts: list[Tensor]) -> list[Tensor]:
    """Return [out, in] parts of a weight; its blocks are so already."""
    return [part.t() for part in parts] if recipe.transposed and _blocks(recipe) is None else parts


def _rows(recipe: Recipe, read: ReadWeight) -> Iterable[WeightRows]:
    """Return what is packed of a recipe's weight and biases, of each expert by itself."""
    if recipe.form.endswith("experts"):
        return _expert_rows(recipe, read)
    if "lora" in recipe.form:
        return _adapter_rows(recipe, [as_tensor(read(i)) for i in recipe.sources])
    parts, biases = _parts(recipe, read), [as_tensor(read(i)) for i in recipe.biases]
    if recipe.form == "packed gated":
        return [_gated_rows(parts, biases)]
    if recipe.form == "packed heads":
        return [packed_weights.plain_rows([own], None) for own in parts[0]]
    if recipe.form == "packed":
        return [packed_weights.plain_rows(parts, _joined(biases) if biases else None)]
    return [packed_weights.int8_rows(*quantize.RoundedWeight.of(_joined(parts)))]


def _expert_rows(recipe: Recipe, read: ReadWeight) -> Iterator[WeightRows]:
    """Yield what is packed of each expert."""
    (weight,) = _sources(recipe, read)
    biases = [as_tensor(read(i)) for i in recipe.biases]
    for e, own in enumerate(weight):
        pieces = [own] if isinstance(own, Tensor) else list(own)
        parts = _turned(recipe, pieces)
        bias = [each[e] for each in biases]
        if recipe.form == "packed experts":
            yield packed_weights.plain_rows(parts, bias[0] if bias else None)
        elif recipe.form == "packed int8 experts":
            yield packed_weights.int8_rows(*quantize.RoundedWeight.of(_joined(parts)))
        else:
            yield _gated_rows(parts if len(parts) == 2 and len(parts[0]) == len(parts[1]) else [_joined(parts)], bias)


def _adapter_rows(recipe: Recipe, weights: list[Tensor]) -> Iterator[WeightRows]:
    """Yield what is packed of A or B of each adapter, of weights [adapters, ...]: of B with zeros between projections.

    Projections of one input have one A, their own below each other, and B whose columns are those of A's rows.
    """
    for own in zip(*weights, strict=True):
        if recipe.form == "packed lora a":
            yield packed_weights.plain_rows(own, None)
            continue
        given, rank, at, parts = iter(own), sum(rank for _, rank in recipe.parts), 0, []
        for outputs, columns in recipe.parts:
            part = own[0].new_zeros(outputs, rank)
            if columns:
                part[:, at : at + columns] = next(given)
            at += columns
            parts.append(part)
        yield _gated_rows(parts, []) if "gated" in recipe.form else packed_weights.plain_rows(parts, None)


def _gated_rows(parts: list[Tensor], biases: list[Tensor]) -> WeightRows:
    one, other = _two(parts)
    return packed_weights.gated_rows(one, other, _two(biases))


def as_tensor(weight: Tensor | Stack) -> Tensor:
    """Return a weight that is one tensor.

    Raises:
        TypeError: If it is a stack of experts that is none.
    """
    held = weight.held() if isinstance(weight, Stack) and weight.joined else weight
    if isinstance(held, Stack):
        raise TypeError("expected one tensor, got a stack of experts")
    return held


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
