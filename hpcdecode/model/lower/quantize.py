"""int8 weights: a scale for every output, and for every token of the input, which is rounded just before its GEMM.

y = (round(x / s) @ round(w / r).T) * s * r, with s = max|x| / 127 of a token and r = max|w| / 127 of an output. Before
that, x and w are multiplied by an orthogonal matrix, which leaves x @ w.T as it is and spreads the few large
activations of a trained model over all inputs (QuaRot, Ashkboos et al. 2024). Rotation, rounding and scaling are steps
of the fused kernels before and after the GEMM.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Product, Type
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.rows import as_rows, as_tokens
from hpcdecode.system.threads import ELEMENTS_AT_ONCE, fill_rows, on_threads

if TYPE_CHECKING:
    from typing_extensions import Self

INT8_MAX = 127
EXACT_SUM = 1 << 24  # up to which float32 has all whole numbers
MIN_SCALE = 1e-30  # of zeros
LEAST_RUN, MOST_RUN, MOST_RUNS = 16, 4096, 16  # elements of a run of a rotation, and runs that are mixed
MAX_INPUTS_PER_OUTPUT = 16  # a projection of more, such as a router of experts, stays as it is


class RotationShape(NamedTuple):
    """How inputs are rotated: `rows` times the Kronecker product of a Hartley and a Hadamard matrix.

    Attributes:
        rows: Parts that are rotated by themselves.
        runs: Order of the Hartley matrix, 1 for none.
        size: Order of the Hadamard matrix, a power of two.
    """

    rows: int
    runs: int
    size: int

    @classmethod
    def of(cls, inputs: int) -> Self | None:
        """Return the shape for so many inputs, or None if they stay as they are: if too few divide them."""
        size = min(inputs & -inputs, MOST_RUN)
        if size < LEAST_RUN:
            return None
        runs = inputs // size
        return cls(1, runs, size) if runs <= MOST_RUNS else cls(runs, 1, size)


def rotated(x: Tensor) -> Tensor:
    """Return x [..., in] times an orthogonal matrix (see `RotationShape`), as float32."""
    shape = RotationShape.of(x.shape[-1])
    if shape is None:
        return x.float()
    rows, runs, size = shape
    inner = 1 << (size.bit_length() // 2)  # a Hadamard matrix is the Kronecker product of two smaller ones
    parts = x.float().unflatten(-1, (rows, runs, size // inner, inner))
    turned: Tensor = _hartley(runs) @ (_hadamard(size // inner) @ (parts @ _hadamard(inner))).flatten(-2)
    return turned.flatten(-3)


class RoundedWeight(NamedTuple):
    """A rotated weight as int8.

    Attributes:
        weight: int8 [out, in].
        scales: float32 [out].
    """

    weight: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Rotate and round a weight [out, in], some rows at a time."""
        made = cls(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)))
        count = max(ELEMENTS_AT_ONCE // weight.shape[1], 1)

        def fill(first: int) -> None:
            rows = slice(first, first + count)
            part = rotated(weight[rows])
            scales = output_scales(part)
            made.weight[rows], made.scales[rows] = rounded(part, scales), scales

        on_threads(fill, range(0, len(weight), count))
        return made


def output_scales(weight: Tensor) -> Tensor:
    """Return the scales float32 [out] of a weight [out, in]."""
    return weight.abs().amax(1).float().div(INT8_MAX).clamp(min=MIN_SCALE)


def rounded(weight: Tensor, scales: Tensor) -> Tensor:
    """Return a weight [out, in] over the scales [out] of its outputs, as whole numbers in float32."""
    return (weight.float() / scales[:, None]).round_()


def row_sums(weight: Tensor) -> Tensor:
    """Return the sums of the rows of an int8 weight [out, in], int32 [out]; in float32 where that has them exactly."""
    inputs = weight.shape[1]
    if inputs > EXACT_SUM // (INT8_MAX + 1):
        return weight.sum(1, dtype=torch.int32)
    made = torch.empty(len(weight), dtype=torch.int32)
    return fill_rows(made, max(ELEMENTS_AT_ONCE // inputs, 1), lambda first, last: weight[first:last].float().sum(1))


def onednn_packed(weight: Tensor, tokens: int) -> Tensor:
    """Return an int8 weight [out, in], packed by oneDNN for that many tokens."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, [tokens, weight.shape[1]])
    return packed


def token_scale(x: Tensor) -> Tensor:
    """Return the scales float32 [..., 1] of activations [..., in]."""
    return x.abs().amax(-1, keepdim=True).float().mul(1 / INT8_MAX).clamp(min=MIN_SCALE)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, rounded to int8."""
    return x.float().mul(scale.reciprocal()).round().to(torch.int8)


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T * scales, without the scales of x.

    Args:
        x: Activations int8 [..., in].
        weight: Weight [out, in] from `pack`.
        scales: Scales float32 [out] of the weight.
        dtype: Type of the result.

    Returns:
        The result [..., out].
    """
    y = torch.ops.onednn.qlinear_pointwise(
        as_rows(x), 1.0, 0, weight, scales, _zeros(len(scales)), None, 1.0, 0, dtype, "none", [], ""
    )
    return as_tokens(y, x)


def scaled(y: Tensor, scale: Tensor) -> Tensor:
    """Return y * scale in the type of y."""
    return y.float().mul(scale).to(y.dtype)


def has_onednn() -> bool:
    """Return True if torch has oneDNN on this machine."""
    return bool(torch.backends.mkldnn.is_available())


def exact() -> bool:
    """Return True if int8 GEMMs are exact here: those of native/ops_cpu, or oneDNN's."""
    return Product.offered(Type.int8, Type.float32, isa()) or exact_onednn()


@functools.cache
def exact_onednn() -> bool:
    """Return True if oneDNN's int8 GEMMs are exact here. Without VNNI, sums of two products may be cut at 2^15."""
    if not has_onednn():
        return False
    x = torch.full((16, 64), INT8_MAX, dtype=torch.int8)
    y = int8_linear(x, onednn_packed(x, len(x)), torch.ones(len(x)), torch.float32)
    return bool((y == 64 * INT8_MAX**2).all())


@functools.cache
def _hadamard(size: int) -> Tensor:
    """Return the symmetric orthogonal matrix [size, size] of a power of two (Sylvester)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


@functools.cache
def _hartley(size: int) -> Tensor:
    """Return the symmetric orthogonal matrix [size, size] of the discrete Hartley transform."""
    places = torch.arange(size, dtype=torch.float64)
    turns = 2 * math.pi * (places[:, None] * places % size) / size
    return ((turns.cos() + turns.sin()) / math.sqrt(size)).float()


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)
