"""Formats whose codes lie [in, out], in words of 32 bits: GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.formats import (
    FLOATS,
    INT32,
    WORD_BITS,
    ScaleBlock,
    Templates,
    WeightFormat,
    WrongTensorsError,
    affine,
    expect_dtype,
    expect_shape,
    finite,
    spread,
    unpacked,
    word_multiple,
)
from hpcdecode.model.frontend.quantization.grids import checked_groups
from hpcdecode.model.frontend.tensors import CheckpointTensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word, the lowest bits first


@dataclass(frozen=True, kw_only=True)
class PackedColumns(WeightFormat):
    """Integers with scales and zero points for groups of inputs: w[o, i] = (q[i, o] - z[g, o]) * s[g, o].

    g is the group of input i: i // group_size, or g_idx[i] of a GPTQ checkpoint that has it (`desc_act`).
    Zero points are packed along the outputs in both formats.

    Attributes:
        bits: Bits of an integer.
        group_size: Inputs of a group, or None for all.
    """

    bits: int
    group_size: int | None
    dtypes: frozenset[str] = INT32
    ending: str = ".qweight"
    plain_ending: str = ".weight"
    needed: Templates = field(default_factory=lambda: {"scale": ("{module}.scales",), "zero": ("{module}.qzeros",)})

    def rows_at_once(self) -> int:
        """Return the integers in a word, or in the least number of whole ones."""
        return word_multiple(self.bits)

    def shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        """Return the shape of a weight, or raise WrongTensorsError."""
        codes = parts["codes"]
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise WrongTensorsError(f"expected codes of two dimensions, got the shape {list(codes.shape)}")
        inputs, outputs = self._sizes(*codes.shape)
        groups = -(-inputs // (self.group_size or inputs))
        if outputs % self.rows_at_once():
            raise WrongTensorsError(f"expected a multiple of {self.rows_at_once()} outputs, got {outputs}")
        expect_dtype("scales", parts["scale"], FLOATS)
        expect_shape("scales", parts["scale"], (groups, outputs))
        expect_dtype("zero points", parts["zero"], INT32)
        expect_shape("zero points", parts["zero"], (groups, outputs * self.bits // WORD_BITS))
        if "group" in parts:
            expect_dtype("groups of inputs", parts["group"], INT32)
            expect_shape("groups of inputs", parts["group"], (inputs,))
        return outputs, inputs

    def _sizes(self, rows: int, words: int) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of codes of this shape."""
        raise NotImplementedError

    def _codes(self, words: Tensor, first: int, last: int) -> Tensor:
        """Return the codes of some outputs, float32 [outputs, in]."""
        raise NotImplementedError

    def _zeros(self, words: Tensor) -> Tensor:
        """Return all zero points, float32 [groups, out]."""
        raise NotImplementedError

    def is_centred(self, zeros: Tensor) -> bool:
        """Return whether all zero points, as they are stored, are the middle of the codes."""
        return bool((self._zeros(zeros) == 1 << (self.bits - 1)).all())

    def scale_block(self) -> ScaleBlock:
        """Return which elements share a scale."""
        return ScaleBlock(1, self.group_size)

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some outputs, one behind the other, the lowest bits first: uint8 [outputs, bytes]."""
        raise NotImplementedError

    def codes(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some outputs, one a byte: uint8 [outputs, in]."""
        return self._codes(parts["codes"], first, last).to(torch.uint8)

    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return codes, and scales and zero points [out, groups]."""
        scale = finite("scales", parts["scale"].to(torch.float32)).t().contiguous()
        made = {"codes": parts["codes"], "scale": scale, "zero": self._zeros(parts["zero"]).t().contiguous()}
        if "group" in parts:
            made["group"] = checked_groups(parts["group"], scale.shape[1])
        return made

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the weights of some outputs."""
        codes = self._codes(parts["codes"], first, last)
        grids = [parts[role][first:last] for role in ("scale", "zero")]
        if "group" in parts:
            return affine(codes, *(grid.index_select(1, parts["group"]) for grid in grids))
        return affine(codes, *(spread(grid, self.scale_block(), *codes.shape) for grid in grids))


@dataclass(frozen=True, kw_only=True)
class Gptq(PackedColumns):
    """GPTQ: codes packed along the inputs. Version 1 stores zero points less 1.

    Attributes:
        version: 1 or 2 (`checkpoint_format` gptq or gptq_v2).
    """

    version: int = 1
    optional: Templates = field(default_factory=lambda: {"group": ("{module}.g_idx",)})

    def _sizes(self, rows: int, words: int) -> tuple[int, int]:
        return rows * WORD_BITS // self.bits, words

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some outputs, uint8 [outputs, bytes]."""
        return parts["codes"][:, first:last].t().contiguous().view(torch.uint8)

    def _codes(self, words: Tensor, first: int, last: int) -> Tensor:
        return unpacked(words[:, first:last].t(), self.bits)

    def _zeros(self, words: Tensor) -> Tensor:
        zeros = unpacked(words, self.bits)
        if self.version == 2:
            return zeros
        most = (1 << self.bits) - 1
        if float(zeros.max()) == most:  # it stands for 0 or 2^bits: tools differ
            raise WrongTensorsError(f"expected zero points below {most}, as version 1 of GPTQ stores them, got {most}")
        return zeros + 1


@dataclass(frozen=True, kw_only=True)
class Awq(PackedColumns):
    """AWQ, version gemm: codes packed along the outputs, interleaved."""

    def _sizes(self, rows: int, words: int) -> tuple[int, int]:
        return rows, words * WORD_BITS // self.bits

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some outputs, uint8 [outputs, bytes]."""
        codes = interleaved(self._words(parts["codes"], first, last))
        return codes[:, ::2] | codes[:, 1::2] << 4

    def _codes(self, words: Tensor, first: int, last: int) -> Tensor:
        return interleaved(self._words(words, first, last)).to(torch.float32)

    def _words(self, words: Tensor, first: int, last: int) -> Tensor:
        return words[:, first // self.rows_at_once() : -(-last // self.rows_at_once())]

    def _zeros(self, words: Tensor) -> Tensor:
        return interleaved(words).t().to(torch.float32)


def interleaved(words: Tensor) -> Tensor:
    """Return the 4-bit codes in the words of AWQ.

    Args:
        words: int32 [n, words].

    Returns:
        uint8 [words * 8, n].
    """
    rows = words.contiguous().view(torch.uint8).t().contiguous()  # of two outputs each
    codes = torch.stack([rows & 15, rows >> 4], 1).view(-1, len(AWQ_ORDER), len(words))
    lowest_of = torch.tensor([AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))])
    return codes.index_select(1, lowest_of).flatten(0, 1)
