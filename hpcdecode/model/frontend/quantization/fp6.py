"""MXFP6: FP6 numbers with a power of two for 32 of a row, as compressed-tensors packs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.formats import BYTES, ScaleBlock, WrongTensorsError
from hpcdecode.model.frontend.quantization.grids import MX_BLOCK, ScaledGrid
from hpcdecode.model.frontend.tensors import CheckpointTensor

MX_ROW = ScaleBlock(1, MX_BLOCK)


@functools.cache
def fp6_table() -> Tensor:
    """Return the FP6 numbers of codes, float32 [64]."""
    codes = torch.arange(64)
    exponents, fractions = codes >> 3 & 3, (codes & 7) / 8
    sizes = torch.where(exponents == 0, fractions, torch.ldexp(1 + fractions, exponents - 1))
    return torch.where(codes > 31, -sizes, sizes)


@functools.cache
def as_fp8() -> Tensor:
    """Return the FP8 numbers (E4M3) that the FP6 numbers of codes are, uint8 [64]."""
    return fp6_table().to(torch.float8_e4m3fn).view(torch.uint8)


def fp6(codes: Tensor) -> Tensor:
    """Return the FP6 numbers in bytes [..., n], float32 [..., 4 n / 3] (OCP Microscaling, E2M3)."""
    return fp6_table()[each_code(codes)]


def each_code(codes: Tensor) -> Tensor:
    """Return the codes of 6 bits in bytes [..., n], int32 [..., 4 n / 3]."""
    parts = codes.unflatten(-1, (-1, 3)).to(torch.int32)
    words = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
    return torch.stack([words >> first & 63 for first in (0, 6, 12, 18)], -1).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class Mxfp6(ScaledGrid):
    """FP6 numbers (E2M3) as compressed-tensors packs them, four in three bytes, with a power of two for 32 of a row."""

    name: str = "MXFP6"
    block: ScaleBlock | None = MX_ROW
    dtypes: frozenset[str] = BYTES
    decoded: Callable[[Tensor], Tensor] = fp6
    scale_dtypes: frozenset[str] = BYTES | {"F8_E8M0"}
    ending: str = "_packed"

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the numbers of some rows as FP8, which holds them: uint8 [rows, columns]."""
        return as_fp8()[each_code(parts["codes"][first:last])]

    def _full_shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        *rows, width = parts["codes"].shape or (0,)
        if width % 3:
            raise WrongTensorsError(f"expected codes in a multiple of 3 bytes, got {width}")
        return (*rows, width // 3 * 4)
