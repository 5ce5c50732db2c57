"""Weights in few bits, as the GEMMs of native/ops_cpu expand them (native/ops_cpu/weight_form.h).

| form | weight | of a group of inputs | bits a weight |
|---|---|---|---|
| int4 | (code - zero) * scale, codes 0 to 15 | 32: float16 scale and zero | 5 |
| mxfp4 | FP4 (E2M1) * 2^exponent | 32: exponent of 8 bits (OCP Microscaling 1.0) | 4.25 |
| mxfp8 | FP8 (E4M3) * 2^exponent | 32: exponent of 8 bits (OCP Microscaling 1.0) | 8.25 |
| fp8 | FP8 (E4M3) * scale | 128: float32 scale | 8.25 |

Weights of bfloat16 and float16 are forms, too, where activations are float32: they keep their numbers.

Blocks of GGUF files are packed as they are. Their forms have the names of their types: codes of 4 or 8 bits, times
float16 scales, or for Q*_K and IQ4_XS times scales of two levels. So are the blocks that the weights of other quantised
checkpoints become (frontend/quantization/blocks.py). Other weights are rounded to the nearest codes.

Activations may be rounded to int8 for GEMMs by all of them but EXACT_ROWS, bfloat16 and float16. Those forms have names
of their own, BY_INT8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode._ops_cpu import BlockType, WeightForm, pack_blocks, pack_few_bits, pack_weights
from hpcdecode.model.frontend.held import BFLOAT16, FLOAT16, Held
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS
from hpcdecode.model.lower.instruction import TYPES

BLOCK_INPUTS = 32  # inputs must be a multiple
PANEL, HALF = 32, 16  # outputs
LINE = 64  # bytes


class FewBits(NamedTuple):
    """A form of weights in few bits.

    Attributes:
        native: What native/ops_cpu calls it.
        group: Inputs that share a scale.
        scale_bytes: Bytes of a group's scales.
        code_bits: Bits of a code.
        block: The blocks that hold the weights, one of BLOCKS, or None.
        rounded: Whether GEMMs round activations to int8, with a scale for 32 inputs of a token.
    """

    native: WeightForm
    group: int
    scale_bytes: int
    code_bits: int
    block: str | None = None
    rounded: bool = False

    @property
    def bits(self) -> float:
        """Return the bits of a weight, with its share of the scales."""
        return self.code_bits + 8 * self.scale_bytes / self.group

    @property
    def multiple(self) -> int:
        """Return what inputs must be a multiple of."""
        return BLOCK_INPUTS if self.block is None else BLOCKS[self.block].inputs

    def inputs(self, part: Tensor) -> int:
        """Return the inputs of a part of a weight as `pack_into` takes it."""
        if self.block is None:
            return part.shape[1]
        size = BLOCKS[self.block]
        return part.shape[1] // size.bytes * size.inputs

    def words(self, inputs: int) -> int:
        """Return the words of 4 bytes of an output's weights and scales."""
        scales = -(-(-(-inputs // self.group) * self.scale_bytes * HALF) // LINE) * LINE
        return 2 * (scales + HALF * inputs * self.code_bits // 8) // (4 * PANEL)

    def pack_into(self, made: Tensor, parts: Sequence[Tensor], bias: Tensor, in_turn: int | None) -> None:
        """Pack a weight into memory that is zeros.

        Args:
            made: The memory, uint8.
            parts: Parts [out_i, in] of the weight, float32 or bfloat16, of any device; of blocks uint8 [out_i, bytes].
            bias: Bias float32 [out].
            in_turn: Rows that each part gives before the next part does, or None for all.
        """
        as_stored = HALVES.get(self.native)
        rows = [p.to("cpu", as_stored or p.dtype).contiguous() for p in parts]
        places = [(p.data_ptr(), p.stride(0) * p.element_size(), len(p)) for p in rows]
        bias, inputs, whole = bias.cpu().contiguous(), self.inputs(rows[0]), sum(map(len, rows))
        threads = torch.get_num_threads()
        if as_stored is not None:
            pack_weights(places, [bias.data_ptr()], self.words(inputs), in_turn or whole, made.data_ptr(), threads)
            return
        to = (bias.data_ptr(), made.data_ptr())
        if self.block is not None:
            pack_blocks(places, BlockType[self.block.lower()], inputs, in_turn or whole, *to, threads)
            return
        kind = TYPES[rows[0].dtype]
        pack_few_bits(places, kind, inputs, in_turn or whole, to[0], self.native, to[1], threads)


FORMS = {
    "int4": FewBits(WeightForm.int4, 32, 4, 4),
    "mxfp4": FewBits(WeightForm.mxfp4, 32, 1, 4),
    "mxfp8": FewBits(WeightForm.mxfp8, 32, 1, 8),
    "fp8": FewBits(WeightForm.fp8, 128, 4, 8),
}
OF_BLOCKS = {
    "Q4_0": FewBits(WeightForm.int4, 32, 4, 4),
    "Q4_1": FewBits(WeightForm.q4_1, 32, 4, 4),
    "Q5_0": FewBits(WeightForm.q8_0, 32, 2, 8),
    "Q5_1": FewBits(WeightForm.q5_1, 32, 4, 8),
    "Q8_0": FewBits(WeightForm.q8_0, 32, 2, 8),
    "Q2_K": FewBits(WeightForm.q2_k, 256, 36, 4),
    "Q3_K": FewBits(WeightForm.q3_k, 256, 18, 4),
    "Q4_K": FewBits(WeightForm.q4_k, 256, 20, 4),
    "Q5_K": FewBits(WeightForm.q5_k, 256, 20, 8),
    "Q6_K": FewBits(WeightForm.q6_k, 256, 18, 8),
    "IQ4_NL": FewBits(WeightForm.iq4_nl, 32, 2, 4),
    "IQ4_XS": FewBits(WeightForm.iq4_xs, 256, 18, 4),
    "MXFP4": FORMS["mxfp4"],
    "i8": FewBits(WeightForm.i8, 128, 4, 8),
    "nf4": FewBits(WeightForm.nf4, 64, 4, 4),
    "nvfp4": FewBits(WeightForm.nvfp4, 256, 20, 4),
    "i4": FORMS["int4"],
    "f8": FORMS["fp8"],
    "mx4": FORMS["mxfp4"],
    "mx8": FORMS["mxfp8"],
}
HALVES = {WeightForm.bf16: torch.bfloat16, WeightForm.f16: torch.float16}
AS_STORED = {BFLOAT16: FewBits(WeightForm.bf16, 32, 0, 16), FLOAT16: FewBits(WeightForm.f16, 32, 0, 16)}
# Those whose GEMMs take no rows rounded to int8.
EXACT_ROWS = (WeightForm.mxfp8, WeightForm.fp8, WeightForm.q2_k, WeightForm.nf4)
EXACT = {**FORMS, **AS_STORED, **{name: form._replace(block=name) for name, form in OF_BLOCKS.items()}}
BY_INT8 = {name: f"{name} by int8" for name in (*FORMS, *OF_BLOCKS) if EXACT[name].native not in EXACT_ROWS}
ALL_FORMS = {**EXACT, **{own: EXACT[name]._replace(rounded=True) for name, own in BY_INT8.items()}}


class NativeForm(NamedTuple):
    """How a native GEMM takes weights, and whether it rounds activations to int8."""

    weights: WeightForm
    rounded: bool


def form_of(bits: str | None) -> NativeForm:
    """Return what native/ops_cpu calls one of ALL_FORMS, or the plain form for None."""
    return (
        NativeForm(WeightForm.plain, False)
        if bits is None
        else NativeForm(ALL_FORMS[bits].native, ALL_FORMS[bits].rounded)
    )


class Quantised(NamedTuple):
    """What the weights of a graph's projections are packed as.

    Attributes:
        to: int8 or one of FORMS for those with many outputs, but in few bits not the LM head; or None.
        held: For each of the graph's weights one of AS_STORED or BLOCKS, which holds its numbers: for those that are
            not quantised, or were so before they were read. Empty if they are to be dequantised.
        int8_activations: Round activations to int8 for GEMMs by weights in few bits.
    """

    to: str | None = None
    held: tuple[Held, ...] = ()
    int8_activations: bool = False

    def of(self, numbers: Sequence[int]) -> Quantised:
        """Return the same for a graph of some of the weights."""
        return self._replace(held=tuple(self.held[i] for i in numbers) if self.held else ())


NOTHING = Quantised()
