"""Packed weights, as the GEMMs of native/ops_cpu take them: groups of 32 outputs, with 32 words in a row.

A group begins with what its sums begin with. For int8 weights the outputs' scales follow. Then come the weights, 4
bytes of each output at a time; those in few bits are in the order of `few_bits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode._ops_cpu import AdapterProduct, AdapterSum, Op, Product, pack_weights
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.few_bits import ALL_FORMS, form_of
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.stage import Stage, TokenRows
from hpcdecode.system.shared_memory import PrivateMemory, WeightMemory

GROUP = 32  # outputs
HALF = GROUP // 2
WORD = torch.int32
UNSIGNED = 128  # added to int8 inputs: a factor of these GEMMs must be unsigned
PRIVATE = PrivateMemory()


def packs(dtype: torch.dtype, bits: str | None = None) -> bool:
    """Return whether weights of a type are packed in this form on this machine; else oneDNN packs them in its own.

    Args:
        dtype: Type of weights and activations.
        bits: Form of weights in few bits for activations of that type, one of ALL_FORMS, or None.
    """
    return dtype in TYPES and Product.offered(TYPES[dtype], TYPES[dtype], isa(), None, *form_of(bits))


def gemm(
    x: Meta, weight: Meta, y: Meta, gate: Op | None = None, bits: str | None = None, update: UpdateSize | None = None
) -> Stage | None:
    """Return the stage that computes y = x @ weight.T, or None if native/ops_cpu has no such GEMM on this machine.

    Args:
        x: Activations [..., in].
        weight: Weight [out, in] before it is packed.
        y: Result [..., out].
        gate: With a gate, y is gate(x @ one.T) * (x @ other.T), for two weights like `weight` from `pack_gated`.
        bits: Form of the weight in few bits, one of ALL_FORMS, or None.
        update: Size of what adapters add to x @ weight.T, or None.
    """
    form = form_of(bits)
    size = x.one_token[-1] * x.dtype.itemsize
    rows = x.token_dim is not None and x.numel_per_token == x.one_token[-1] and x.token_dim < len(x.shape) - 1
    known = x.dtype in TYPES and y.dtype in TYPES
    if not rows or not known or size % WORD.itemsize or (gate is not None and y.one_token[-1] % HALF):
        return None
    x_type, y_type = TYPES[x.dtype], TYPES[y.dtype]
    outputs = y.one_token[-1] * (1 if gate is None else 2)
    if not Product.offered(x_type, y_type, isa(), gate, *form) or (
        bits is not None and x.one_token[-1] % ALL_FORMS[bits].multiple
    ):
        return None
    words = size // WORD.itemsize
    if update is None:
        work = Product(x_type, y_type, words, outputs, isa(), gate, *form)
        return Stage(work, [TokenRows(x), TokenRows(weight)], [TokenRows(y)])
    if x_type is not y_type:
        return None
    added = update.product(x.dtype)
    work = Product(x_type, y_type, words, outputs, isa(), gate, *form, update=added, adapters=update.adapters)
    return Stage(
        work, [TokenRows(each) for each in (x, weight, update.numbers, update.low(x), update.b)], [TokenRows(y)]
    )


def head_gemm(x: Meta, weight: Meta, y: Meta) -> Stage | None:
    """Return the stage that projects each head by a weight of its own, or None if there is no such GEMM here.

    Args:
        x: Activations [T, heads * in].
        weight: Weights [heads, out, in] before they are packed.
        y: Result [T, heads * out].
    """
    heads, outputs, inputs = weight.one_token
    size = inputs * x.dtype.itemsize
    if x.dtype not in TYPES or x.dtype != y.dtype or size % WORD.itemsize:
        return None
    kind = TYPES[x.dtype]
    if not Product.offered(kind, kind, isa()):
        return None
    work = Product(kind, kind, size // WORD.itemsize, outputs, isa(), heads=heads)
    return Stage(work, [TokenRows(x), TokenRows(weight)], [TokenRows(y)])


class UpdateSize(NamedTuple):
    """The size of what adapters (LoRA) add to projections of one input that become one: B_a (A_a x).

    Attributes:
        adapters: Number of adapters.
        parts: Outputs of every projection, and the rank of all adapters there, or 0 if none updates it.
        numbers: Shape and dtype of the tokens' adapters.
        b: Shape and dtype of one projection's B.
    """

    adapters: int
    parts: tuple[tuple[int, int], ...]
    numbers: Meta
    b: Meta

    @property
    def rank(self) -> int:
        """Return the number of elements of A x."""
        return sum(rank for _, rank in self.parts)

    @property
    def outputs(self) -> int:
        """Return the number of outputs of all projections."""
        return sum(outputs for outputs, _ in self.parts)

    def low(self, x: Meta) -> Meta:
        """Return shape and dtype of A x."""
        return Meta.of(x.dtype, (*self.numbers.shape, self.rank))

    def packed(self, inputs: int, dtype: torch.dtype) -> tuple[PackedSize, PackedSize]:
        """Return the packed sizes of A and B."""
        of_a, of_b = (size * dtype.itemsize // WORD.itemsize for size in (inputs, self.rank))
        return PackedSize(self.rank, of_a, 1, self.adapters), PackedSize(self.outputs, of_b, 1, self.adapters)

    def product(self, dtype: torch.dtype) -> Product:
        """Return the GEMM by B of one adapter."""
        return Product(TYPES[dtype], TYPES[dtype], self.rank * dtype.itemsize // WORD.itemsize, self.outputs, isa())

    def low_stage(self, x: Meta) -> Stage:
        """Return the stage that computes A x of the tokens' adapters, from (adapters, x, A)."""
        kind, words = TYPES[x.dtype], x.one_token[-1] * x.dtype.itemsize // WORD.itemsize
        work = AdapterProduct(Product(kind, kind, words, self.rank, isa()), self.adapters)
        return Stage(work, [TokenRows(self.numbers), TokenRows(x), TokenRows(self.b)], [TokenRows(self.low(x))])

    def sum_stage(self, x: Meta, y: Meta) -> Stage:
        """Return the stage that computes y + B (A x), from (adapters, y, A x, B)."""
        work = AdapterSum(self.product(x.dtype), self.adapters)
        return Stage(work, [TokenRows(each) for each in (self.numbers, y, self.low(x), self.b)], [TokenRows(y)])


class PackedSize(NamedTuple):
    """The size of a packed weight.

    Attributes:
        outputs: Number of outputs.
        words: Words of 4 bytes of an output's weights, and scales if they are in few bits.
        heads: Words that a group begins with, for each output.
        experts: Number of experts, or heads, each of which has a weight of that size.
    """

    outputs: int
    words: int
    heads: int
    experts: int = 1

    @classmethod
    def of(cls, parts: Sequence[Tensor], heads: int = 1) -> PackedSize:
        """Return the size for the parts [out_i, in] of a weight."""
        return cls(sum(map(len, parts)), parts[0].shape[1] * parts[0].element_size() // WORD.itemsize, heads)

    @classmethod
    def of_heads(cls, weight: Meta) -> PackedSize:
        """Return the size for the weights [heads, out, in] of heads."""
        heads, outputs, inputs = weight.one_token
        return cls(outputs, inputs * weight.dtype.itemsize // WORD.itemsize, 1, heads)

    @property
    def shape(self) -> torch.Size:
        """Return [experts * groups, heads + words, 32], the shape of the packed weight."""
        return torch.Size((self.experts * -(-self.outputs // GROUP), self.heads + self.words, GROUP))

    @property
    def bytes(self) -> int:
        """Return the bytes of the packed weight."""
        return self.shape.numel() * WORD.itemsize


class WeightRows(NamedTuple):
    """What is packed.

    Attributes:
        parts: Parts [out_i, in] of the weight.
        heads: Numbers of 4 bytes [out] that groups begin with.
        in_turn: Rows that each part gives before the next part does, or None for all.
    """

    parts: Sequence[Tensor]
    heads: Sequence[Tensor]
    in_turn: int | None = None


def pack(parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """Return the packed form of a weight.

    Args:
        parts: Parts [out_i, in] of the weight, float32 or bfloat16, stacked along their first dimension.
        bias: Bias [out] of the GEMM, or None.
    """
    return packed(PackedSize.of(parts), lambda: [plain_rows(parts, bias)])


def pack_gated(one: Tensor, other: Tensor, biases: Sequence[Tensor] = ()) -> Tensor:
    """Return the packed form of two weights that gate each other (see `gated_rows`)."""
    return packed(PackedSize.of([one, other]), lambda: [gated_rows(one, other, biases)])


def pack_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the packed form of the int8 `weight` [out, in] that stands for weight * scales[:, None]."""
    return packed(PackedSize.of([weight], heads=2), lambda: [int8_rows(weight, scales)])


def pack_few_bits(bits: str, parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """Return the packed form of a weight in few bits.

    Args:
        bits: Its form, one of ALL_FORMS.
        parts: Parts [out_i, in] of the weight, or [out_i, bytes] of its blocks, stacked along their first dimension.
        bias: Bias [out] of the GEMM, or None.
    """
    form = ALL_FORMS[bits]
    size = PackedSize(sum(map(len, parts)), form.words(form.inputs(parts[0])), 1)
    return packed(size, lambda: [plain_rows(parts, bias)], bits=bits)


def plain_rows(parts: Sequence[Tensor], bias: Tensor | None) -> WeightRows:
    """Return what is packed for a weight in `parts` and its bias, zeros if that is None."""
    return WeightRows(parts, [torch.zeros(sum(map(len, parts))) if bias is None else bias.float()])


def gated_rows(one: Tensor, other: Tensor, biases: Sequence[Tensor]) -> WeightRows:
    """Return what is packed for two weights that gate each other: half of each group of the one, half of the other.

    Args:
        one: Weight [out, in] of the gate, float32 or bfloat16.
        other: Weight [out, in] of what is gated.
        biases: The biases [out] of both, or nothing.
    """
    bias = torch.stack([b.view(-1, HALF) for b in biases], 1).flatten() if biases else torch.zeros(2 * len(one))
    return WeightRows([one, other], [bias.float()], HALF)


def int8_rows(weight: Tensor, scales: Tensor) -> WeightRows:
    """Return what is packed for the int8 `weight` [out, in] that stands for weight * scales[:, None]."""
    return WeightRows([weight], [quantize.row_sums(weight) * -UNSIGNED, scales])


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [32 * groups, in] of `dtype` in some groups that `pack` made."""
    words: Tensor = packed[:, 1:].view(dtype).unflatten(-1, (GROUP, -1))
    return words.movedim(2, 1).flatten(2).flatten(0, 1)


def packed(
    size: PackedSize, rows: Callable[[], Iterable[WeightRows]], memory: WeightMemory = PRIVATE, bits: str | None = None
) -> Tensor:
    """Return a weight packed in some memory: int32 [experts * groups, heads + words, 32].

    Args:
        size: Its size.
        rows: What is packed of each expert or head; asked only where it is made.
        memory: Where to put it.
        bits: Its form in few bits, one of ALL_FORMS, or None.
    """

    def fill(made: Tensor) -> None:
        for own, given in zip(made.unflatten(0, (size.experts, -1)), rows(), strict=True):
            if bits is None:
                pack_into(own, given)
            else:
                ALL_FORMS[bits].pack_into(own, given.parts, given.heads[0], given.in_turn)

    return memory.filled(size.bytes, fill).view(WORD).view(size.shape)


def pack_into(made: Tensor, rows: WeightRows) -> None:
    """Pack rows into memory that is zeros, uint8 [bytes]. What is missing of the last group stays zero."""
    weights, firsts = ([t.contiguous().view(WORD) for t in tensors] for tensors in (rows.parts, rows.heads))
    outputs, words = sum(map(len, weights)), weights[0].shape[1]
    places = [(p.data_ptr(), p.stride(0) * WORD.itemsize, len(p)) for p in weights]
    heads = [h.data_ptr() for h in firsts]
    pack_weights(places, heads, words, rows.in_turn or outputs, made.data_ptr(), torch.get_num_threads())
