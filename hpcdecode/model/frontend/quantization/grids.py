"""Formats whose codes lie as their weight does, [out, in], with a grid of scales beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.formats import (
    ANY_SCALES,
    BYTES,
    CHANNEL,
    INT32,
    TENSOR,
    WORD_BITS,
    ScaleBlock,
    Templates,
    WeightFormat,
    WrongTensorsError,
    affine,
    expect_dtype,
    expect_grid,
    expect_shape,
    finite,
    looked_up,
    numbers,
    pairs,
    spread,
    unpacked,
)
from hpcdecode.model.frontend.tensors import CheckpointTensor

FP8 = frozenset({"F8_E4M3"})
MX_BLOCK = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1


@functools.cache
def fp4_table() -> Tensor:
    """Return the two FP4 numbers in each byte, float32 [256, 2]."""
    return pairs(torch.tensor(FP4_VALUES), lower_first=True)


@functools.cache
def fp8_table() -> Tensor:
    """Return the FP8 number in each byte, float32 [256, 1]."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)[:, None]


def fp4(codes: Tensor) -> Tensor:
    """Return the FP4 numbers in bytes [..., n], float32 [..., 2 n] (OCP Microscaling, E2M1)."""
    return looked_up(codes, fp4_table())


def fp8(codes: Tensor) -> Tensor:
    """Return FP8 numbers [..., n] in float32 (E4M3)."""
    return looked_up(codes, fp8_table())


def integer(codes: Tensor) -> Tensor:
    """Return int8 numbers in float32."""
    return codes.to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class ScaledGrid(WeightFormat):
    """Numbers in few bits times a scale a block: w = (q - z) * s * g^e, z = 0 and g = 1 if there are none.

    FP8: DeepSeek-V3 and Qwen3 store `weight_scale_inv`, which multiplies in spite of its name. NVFP4: blocks of 16
    columns with FP8 scales, and g for the whole weight, which ModelOpt multiplies by and compressed-tensors divides by.

    Attributes:
        block: Size of the blocks; None if the number of scales tells whether it is all of the weight, or a row.
        decoded: Returns the numbers q of codes, float32.
        per_code: Numbers in an element of the codes.
        scale_dtypes: Dtypes that scales may have.
        exponent: e, 1 or -1.
    """

    block: ScaleBlock | None
    dtypes: frozenset[str] = FP8
    decoded: Callable[[Tensor], Tensor] = fp8
    per_code: int = 1
    scale_dtypes: frozenset[str] = ANY_SCALES
    exponent: int = 1

    def rows_at_once(self) -> int:
        """Return the rows of a block."""
        return (self.block.rows if self.block else None) or 1

    def shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        """Return the shape of a weight, or raise WrongTensorsError."""
        shape = self._full_shape(parts)
        if len(shape) not in (2, 3) or min(shape) < 1:
            raise WrongTensorsError(f"expected a matrix or a stack of matrices, got the shape {list(shape)}")
        for role, stored in parts.items():
            self._check(role, stored, shape)
        return shape

    def _full_shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        *rows, width = parts["codes"].shape or (0,)
        return (*rows, width * self.per_code)

    def block_of(self, scales: tuple[int, ...], shape: tuple[int, ...]) -> ScaleBlock:
        """Return which elements of a weight of `shape` share a scale, for scales of the shape `scales`.

        If the format does not say so: of experts, [E, rows, columns], a matrix may have one, each row or each column.
        """
        if self.block is not None:
            return self.block
        *stack, rows, columns = shape
        if math.prod(scales) == 1 or scales in ((*stack,), (*stack, 1), (*stack, 1, 1)):
            return TENSOR
        return ScaleBlock(None, 1) if stack and scales == (*stack, 1, columns) != (*stack, rows, 1) else CHANNEL

    def _check(self, role: str, stored: CheckpointTensor, shape: tuple[int, ...]) -> None:
        if role == "overall":
            expect_dtype("a scale", stored, ANY_SCALES)
            expect_shape("one scale", stored, (), (1,))
        elif role != "codes":
            expect_dtype(f"{role}s", stored, self.scale_dtypes if role == "scale" else frozenset({"I8"}))
            if self.block is not None or math.prod(stored.shape) > 1:
                expect_grid(f"{role}s", stored, self.block_of(stored.shape, shape).grid(shape))

    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return codes, scales and zero points, the latter as grids in float32."""
        scale = numbers(parts["scale"])
        block = self.block_of(scale.shape, shape)
        if "overall" in parts:
            scale = scale * self.overall(parts["overall"])
        made = {"codes": parts["codes"], "scale": gridded(finite("scales", scale), block.grid(shape))}
        if "zero" in parts:
            made["zero"] = gridded(parts["zero"].to(torch.float32), block.grid(shape))
        return made

    def overall(self, stored: Tensor) -> Tensor:
        """Return what scales are multiplied by for all of the weight, g^e, float32."""
        found = finite("a scale of the weight", numbers(stored))
        return found if self.exponent > 0 else found.reciprocal()

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return rows of a matrix."""
        codes = self.decoded(parts["codes"][first:last])
        grids = (self._part_of(parts[role], first, last) for role in ("scale", "zero") if role in parts)
        by_column = ScaleBlock(None, 1) if len(parts["scale"]) == 1 else CHANNEL
        return affine(codes, *(spread(grid, self.block or by_column, *codes.shape) for grid in grids))

    def scale_block(self) -> ScaleBlock:
        """Return which elements of a matrix share a scale."""
        return self.block or CHANNEL

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some rows, one behind the other, the lowest bits first: uint8 [rows, bytes]."""
        return parts["codes"][first:last].contiguous().view(torch.uint8)

    def _part_of(self, grid: Tensor, first: int, last: int) -> Tensor:
        """Return what of `grid` concerns some rows of a matrix."""
        rows = self.rows_at_once()
        return grid if len(grid) == 1 else grid[first // rows : -(-last // rows)]


@dataclass(frozen=True, kw_only=True)
class PackedIntegers(ScaledGrid):
    """Integers of 2 to 8 bits in words, as compressed-tensors' pack-quantized: w = (q - z) * s.

    `weight_shape` holds the shape. Codes are stored with 2^(bits - 1) added, and so are zero points, which are packed
    along the rows. With `weight_g_idx` input i has the scales of group weight_g_idx[i].

    Attributes:
        bits: Bits of an integer.
    """

    bits: int = 4
    dtypes: frozenset[str] = INT32
    ending: str = "_packed"

    def _full_shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        stored = parts["shape"]
        expect_dtype("a shape", stored, frozenset({"I64", "I32"}))
        expect_shape("a shape", stored, (2,))
        rows, columns = stored().tolist()
        padded = WORD_BITS // self.bits  # codes of a word in older releases, which leave some bits of it
        if WORD_BITS % self.bits and parts["codes"].shape == (rows, -(-columns // padded)):
            raise WrongTensorsError(
                f"expected codes of {self.bits} bits without gaps, as compressed-tensors 0.20 packs them"
            )
        expect_shape("codes", parts["codes"], (rows, -(-columns * self.bits // WORD_BITS)))
        return rows, columns

    def _check(self, role: str, stored: CheckpointTensor, shape: tuple[int, ...]) -> None:
        rows, columns = shape
        if role == "zero":
            blocks = (self.block or CHANNEL).grid(shape)[1]
            expect_dtype("zero points", stored, INT32)
            expect_shape("zero points", stored, (-(-rows * self.bits // WORD_BITS), blocks))
        elif role == "group":
            expect_dtype("groups of inputs", stored, INT32)
            expect_shape("groups of inputs", stored, (columns,))
        elif role == "scale":
            super()._check(role, stored, shape)

    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return codes, scales, zero points and groups."""
        plain = {role: parts[role] for role in ("codes", "scale")}
        made = super().prepared(plain, shape)
        made["columns"] = torch.tensor(shape[1])
        if "zero" in parts:
            made["zero"] = unpacked(parts["zero"].t(), self.bits).t()[: shape[0]]
        else:
            made["zero"] = torch.full((1, 1), float(1 << (self.bits - 1)))
        if "group" in parts:
            made["group"] = checked_groups(parts["group"], made["scale"].shape[1])
        return made

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return rows of a weight."""
        codes = self._codes(parts, first, last)
        columns = codes.shape[1]
        grids = [self._part_of(parts[role], first, last) for role in ("scale", "zero")]
        if "group" in parts:
            wide = [grid if grid.shape[1] == 1 else grid.index_select(1, parts["group"]) for grid in grids]
        else:
            wide = [spread(grid, self.block or CHANNEL, len(codes), columns) for grid in grids]
        return affine(codes, *wide)

    def codes(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some rows, one a byte: uint8 [rows, columns]."""
        return self._codes(parts, first, last).to(torch.uint8)

    def _codes(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        return unpacked(parts["codes"][first:last], self.bits)[:, : int(parts["columns"])]


def gridded(scales: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return scales in the shape of their grid; one for all, which may have any shape, for each of a stack."""
    return scales.reshape(()).expand(grid) if scales.numel() == 1 else scales.reshape(grid)


def checked_groups(groups: Tensor, count: int) -> Tensor:
    """Return the group of each input, int64; raise WrongTensorsError unless all are among `count` groups."""
    least, most = (int(end) for end in groups.aminmax())
    if not 0 <= least <= most < count:
        raise WrongTensorsError(f"expected groups of inputs from 0 to {count - 1}, got {least} to {most}")
    return groups.to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Experts(WeightFormat):
    """FP4 weights of all experts of a layer with a scale for 32 of a row, as gpt-oss stores them: w = q * 2^(e - 127).

    `*_blocks`, uint8 [E, out, in / 32, 16], and `*_scales`, uint8 [E, out, in / 32], make up the weight [E, in, out].
    """

    name: str = "MXFP4"
    dtypes: frozenset[str] = BYTES
    ending: str = "_blocks"
    needed: Templates = field(default_factory=lambda: {"scale": ("{key}_scales",)})

    def rows_at_once(self) -> int:
        """Return the inputs that share a scale."""
        return MX_BLOCK

    def scale_block(self) -> ScaleBlock:
        """Return which elements of a matrix [out, in] share a scale."""
        return ScaleBlock(1, MX_BLOCK)

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some outputs of an expert, uint8 [outputs, in / 2]."""
        return parts["codes"][first:last]

    def shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        """Return the shape of a weight, or raise WrongTensorsError."""
        blocks, scales = parts["codes"], parts["scale"]
        if len(blocks.shape) != 4 or blocks.shape[-1] != MX_BLOCK // 2 or 0 in blocks.shape:
            raise WrongTensorsError(f"expected blocks of shape [experts, out, in / 32, 16], got {list(blocks.shape)}")
        expect_dtype("scales", scales, BYTES)
        expect_shape("scales", scales, blocks.shape[:-1])
        experts, out, groups, _ = blocks.shape
        return experts, groups * MX_BLOCK, out

    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return codes and scales."""
        return {"codes": parts["codes"].flatten(2), "scale": finite("scales", numbers(parts["scale"]))}

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the weights of some inputs of an expert, [inputs, out]."""
        codes = parts["codes"][:, first // 2 : last // 2].t().contiguous()
        halves = [looked_up(codes, half) for half in fp4_table().split(1, dim=1)]
        scale = parts["scale"][:, first // MX_BLOCK : last // MX_BLOCK].t()
        values = torch.stack(halves, 1).view(-1, MX_BLOCK, codes.shape[1])
        return values.mul_(scale[:, None]).flatten(0, 1)
