"""What a format of quantised weights is: which tensors make up a weight, and how its values follow from them.

Every format here is affine in blocks: w = (q - z) * s, with codes q, and scales s and zero points z that hold for a
block of rows and columns each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode.model.frontend.tensors import CheckpointTensor

WORD_BITS = 32
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # safetensors' names
ANY_SCALES = FLOATS | {"F8_E8M0"}
INT8, INT32, BYTES = frozenset({"I8"}), frozenset({"I32"}), frozenset({"U8"})
Templates = Mapping[str, tuple[str, ...]]


class WrongTensorsError(ValueError):
    """The tensors of a weight do not fit together. The text says what was expected, and what came."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat(ABC):
    """A way to store weights in few bits.

    Attributes:
        name: Its name in messages.
        dtypes: Dtypes that codes may have.
        ending: What the key of a weight's codes ends with.
        plain_ending: What the weight's own key has in place of `ending`.
        needed: Keys of the other tensors, by role. One of several must be there. In them {key} stands for the weight's
            key, and {module} for that key up to its last dot.
        optional: The same for tensors that may be absent.
    """

    name: str
    dtypes: frozenset[str]
    ending: str = ""
    plain_ending: str = ""
    needed: Templates = field(default_factory=dict)
    optional: Templates = field(default_factory=dict)

    def holds(self, key: str, stored: CheckpointTensor) -> bool:
        """Return whether `stored`, whose key is `key`, is the codes of a weight."""
        return key.endswith(self.ending) and stored.dtype in self.dtypes

    def weight_key(self, key: str) -> str:
        """Return the key of the weight whose codes have the key `key`."""
        return key.removesuffix(self.ending) + self.plain_ending

    def rows_at_once(self) -> int:
        """Return the number that rows of a weight are computed in multiples of."""
        return 1

    @abstractmethod
    def shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        """Return the shape of a weight.

        Args:
            parts: Tensors by role; that of the codes is "codes".

        Raises:
            WrongTensorsError: If shapes or dtypes of the tensors do not fit together.
        """

    @abstractmethod
    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return what `rows` takes, made once of the tensors of a weight of `shape`, [rows, columns].

        For a stack of matrices, [n, rows, columns], the first dimension of all that is returned counts matrices.

        Raises:
            WrongTensorsError: If values of the tensors cannot be right.
        """

    @abstractmethod
    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return a matrix from its row `first` up to the row before `last`, in float32.

        Args:
            parts: Result of `prepared`, for one matrix.
            first: First row, a multiple of `rows_at_once`.
            last: Another multiple, or the number of rows.
        """


class ScaleBlock(NamedTuple):
    """How many rows and columns of a weight share a scale. None stands for all of them."""

    rows: int | None
    columns: int | None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of `shape`. The last blocks may be ragged."""
        *stack, rows, columns = shape
        return (*stack, -(-rows // (self.rows or rows)), -(-columns // (self.columns or columns)))


TENSOR, CHANNEL = ScaleBlock(None, None), ScaleBlock(1, None)


def expect_dtype(role: str, stored: CheckpointTensor, dtypes: frozenset[str]) -> None:
    """Raise WrongTensorsError unless `stored` has one of `dtypes`; role: what to call it."""
    if stored.dtype not in dtypes:
        raise WrongTensorsError(f"expected {role} in {' or '.join(sorted(dtypes))}, got {stored.dtype}")


def expect_shape(role: str, stored: CheckpointTensor, *shapes: tuple[int, ...]) -> None:
    """Raise WrongTensorsError unless `stored` has one of `shapes`; role: what to call it."""
    if stored.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise WrongTensorsError(f"expected {role} of shape {expected}, got {list(stored.shape)}")


def expect_grid(role: str, stored: CheckpointTensor, grid: tuple[int, ...]) -> None:
    """Raise WrongTensorsError unless `stored` has the shape `grid`. Sizes of 1 at the end may be left out."""
    shapes = [grid]
    while grid and grid[-1] == 1:
        grid = grid[:-1]
        shapes.append(grid)
    expect_shape(role, stored, *shapes, *([(1,)] if not grid else []))


def finite(role: str, values: Tensor) -> Tensor:
    """Return `values`, or raise WrongTensorsError if one is not finite; role: what to call them."""
    if not bool(torch.isfinite(values).all()):
        raise WrongTensorsError(f"expected {role} that are finite, got NaN or infinite ones")
    return values


def numbers(scales: Tensor) -> Tensor:
    """Return scales in float32. Bytes are exponents: 2^(byte - 127), and 255 is NaN (OCP Microscaling, E8M0)."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def spread(grid: Tensor, block: ScaleBlock, rows: int, columns: int) -> Tensor:
    """Return the number in `grid` that holds for each element of a weight.

    Args:
        grid: One number a block, [..., R, C].
        block: Size of the blocks.
        rows: Rows of the weight.
        columns: Its columns.

    Returns:
        [..., rows, columns]. A size is 1 where one number holds for all.
    """
    if grid.shape[-2] > 1 and block.rows is not None and block.rows > 1:
        grid = grid.repeat_interleave(block.rows, -2)[..., :rows, :]
    if grid.shape[-1] == 1 or block.columns is None:
        return grid
    return grid[..., None].expand(*grid.shape, block.columns).flatten(-2)[..., :columns]


def affine(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Return (codes - zeros) * scales, in place of `codes`. All are float32, of shapes that broadcast to its own."""
    if zeros is not None:
        codes -= zeros
    return codes.mul_(scales)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes in words of 32 bits, the lowest bits first. A code may lie in two words.

    Args:
        words: int32 [..., words].
        bits: Bits of a code, 2 to 8.

    Returns:
        float32 [..., words * 32 / bits], rounded down.
    """
    if bits in (4, 8):
        codes = words.contiguous().view(torch.uint8)
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return codes.to(torch.float32)
    count = words.shape[-1] * WORD_BITS // bits
    whole = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits)).unflatten(-1, (-1, bits))  # of 32 codes
    wide = whole.to(torch.int64) & 0xFFFFFFFF
    both = wide | torch.nn.functional.pad(wide[..., 1:], (0, 1)) << WORD_BITS  # each with the one behind it
    firsts = torch.arange(WORD_BITS) * bits
    found: Tensor = both[..., firsts // WORD_BITS] >> firsts % WORD_BITS & (1 << bits) - 1
    return found.flatten(-2)[..., :count].to(torch.float32)


def word_multiple(bits: int) -> int:
    """Return the least number of codes that fill whole words of 32 bits."""
    return WORD_BITS // math.gcd(WORD_BITS, bits)


def looked_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return the numbers that bytes stand for.

    Args:
        codes: Tensor of 1 byte an element, [..., n].
        table: float32 [256, k], the numbers of each byte.

    Returns:
        float32 [..., n * k].
    """
    each = table.shape[1]
    whole = table.view(torch.int64) if each == 2 else table  # as one element, which is several times faster
    found = whole.flatten().index_select(0, codes.reshape(-1).view(torch.uint8).int())
    return found.view(torch.float32).view(*codes.shape[:-1], codes.shape[-1] * each)


def pairs(table: Tensor, lower_first: bool) -> Tensor:
    """Return the two numbers in each byte, float32 [256, 2].

    Args:
        table: Numbers that 4 bits stand for, float32 [16].
        lower_first: Whether the first of them is in the lower half of the byte.
    """
    byte = torch.arange(256)
    lower, upper = table[byte & 15], table[byte >> 4]
    return torch.stack([lower, upper] if lower_first else [upper, lower], 1)
