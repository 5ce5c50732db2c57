"""Weights in few bits, as the GEMMs of native/ops_cpu expand them (native/ops_cpu/weight_form.h).

| form | weight | of a group of inputs | bits a weight |
|---|---|---|---|
| int4 | (code - zero) * scale, codes 0 to 15 | 32: float16 scale and zero | 5 |
| mxfp4 | FP4 (E2M1) * 2^exponent | 32: exponent of 8 bits (OCP Microscaling 1.0) | 4.25 |
| fp8 | FP8 (E4M3) * scale | 128: float32 scale | 8.25 |

Numbers are rounded to the nearest code. Those that lie on a grid of such a form stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode._ops_cpu import WeightForm

BLOCK_INPUTS = 32  # inputs must be a multiple
PANEL, HALF = 32, 16  # outputs
PANELS_AT_ONCE = 32
FLOAT16_MAX = 65504.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_BETWEEN = (E2M1[1:] + E2M1[:-1]) / 2
LEAST_EXPONENT, MOST_EXPONENT, EXPONENT_BIAS = 2, 252, 127  # all numbers of a group are normal bfloat16
FP8_MAX = 448.0
LINE = 64  # bytes


class Quantised(NamedTuple):
    """A weight in few bits.

    Attributes:
        codes: uint8 [out, in].
        scales: What holds for groups of inputs, [out, groups] each.
    """

    codes: Tensor
    scales: Sequence[Tensor]


class FewBits(NamedTuple):
    """A form of weights in few bits.

    Attributes:
        native: What native/ops_cpu calls it.
        group: Inputs that share a scale.
        scale_bytes: Bytes of a group's scales.
        code_bits: Bits of a code.
        quantised: Returns a weight [out, in] in this form.
        arranged: Returns codes uint8 [panels, 2, 16, in] in the order of a panel's halves, [panels, 2, bytes].
    """

    native: WeightForm
    group: int
    scale_bytes: int
    code_bits: int
    quantised: Callable[[Tensor], Quantised]
    arranged: Callable[[Tensor], Tensor]

    def words(self, inputs: int) -> int:
        """Return the words of 4 bytes of an output's weights and scales."""
        return 2 * (self._scale_bytes(inputs) + HALF * inputs * self.code_bits // 8) // (4 * PANEL)

    def fill(self, out: Tensor, rows: Iterator[Tensor]) -> None:
        """Write panels but for what they begin with.

        Args:
            out: int32 [panels, 1 + words, 32], zeros so far.
            rows: Weights [n, in] of the next PANELS_AT_ONCE panels; the last may have fewer rows.
        """
        for first, weight in zip(range(0, len(out), PANELS_AT_ONCE), rows, strict=True):
            own = out[first : first + PANELS_AT_ONCE, 1:].flatten(1).view(torch.uint8).unflatten(1, (2, -1))
            missing = len(own) * PANEL - len(weight)
            whole = torch.cat((weight, weight.new_zeros(missing, weight.shape[1]))) if missing else weight
            found = self.quantised(whole)
            split = self._scale_bytes(weight.shape[1])
            scales = torch.stack([s.view(-1, 2, HALF, s.shape[1]).transpose(2, 3) for s in found.scales], 3)
            used = scales.contiguous().flatten(2).view(torch.uint8)
            own[..., : used.shape[-1]] = used
            own[..., split:] = self.arranged(found.codes.view(-1, 2, HALF, weight.shape[1]))

    def _scale_bytes(self, inputs: int) -> int:
        """Return the bytes of the scales in a half."""
        return -(-(-(-inputs // self.group) * self.scale_bytes * HALF) // LINE) * LINE


def grouped(weight: Tensor, group: int) -> Tensor:
    """Return a weight [out, in] as float32 [out, groups, group], with zeros behind its end."""
    missing = -weight.shape[1] % group
    groups: Tensor = torch.nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, group))
    return groups


def int4(weight: Tensor) -> Quantised:
    """Return a weight [out, in] as int4. The least and the largest number of a group are codes 0 and 15."""
    w = grouped(weight, 32)
    low, high = w.amin(2), w.amax(2)
    largest = torch.maximum(low.abs(), high.abs())
    scale = torch.maximum((high - low) / 15, largest / 1024).clamp(max=FLOAT16_MAX).half()
    by = torch.where(scale == 0, 1, scale.float())
    zero = (-low / by).half()
    codes = (w / by[..., None] + zero.float()[..., None]).round_().clamp_(0, 15)
    return Quantised(codes.to(torch.uint8).flatten(1), [scale, zero])


def mxfp4(weight: Tensor) -> Quantised:
    """Return a weight [out, in] as MXFP4: of the exponents that cut off the largest number, or do not, the better."""
    w = grouped(weight, 32)
    _, exponent = torch.frexp(w.abs().amax(2))  # the largest number is below 2^exponent
    tries = [_mxfp4(w, exponent - 3 + more) for more in (0, 1)]
    (codes, exponents, errors), (others, larger, other_errors) = tries
    better = other_errors < errors
    codes = torch.where(better[..., None], others, codes)
    return Quantised(codes.flatten(1), [torch.where(better, larger, exponents)])


def _mxfp4(w: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, exponents and squared errors of groups with given exponents."""
    stored = (exponent + EXPONENT_BIAS).clamp(LEAST_EXPONENT, MOST_EXPONENT)
    scaled = torch.ldexp(w, (EXPONENT_BIAS - stored)[..., None])
    magnitude = scaled.abs()
    codes = torch.bucketize(magnitude.contiguous(), E2M1_BETWEEN)
    errors = (magnitude - E2M1[codes]).square_().sum(2)
    signed = codes.to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return signed, stored.to(torch.uint8), torch.ldexp(errors, 2 * (stored - EXPONENT_BIAS))


def fp8(weight: Tensor) -> Quantised:
    """Return a weight [out, in] as FP8, with the largest number of a group at 448."""
    w = grouped(weight, 128)
    scale = w.abs().amax(2).div_(FP8_MAX)
    by = torch.where(scale == 0, 1, scale)[..., None]
    codes = (w / by).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return Quantised(codes.flatten(1)[:, : weight.shape[1]], [scale])


def _halves_joined(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [..., 2] as bytes [...], the first in the lower half."""
    lower, upper = codes.unbind(-1)
    return lower | upper << 4


def _int4_order(codes: Tensor) -> Tensor:
    """Return codes in the order of Int4Layout: 8 words of an input of an output share 4 bytes."""
    panels, inputs = len(codes), codes.shape[-1]
    parts = codes.view(panels, 2, 2, 8, inputs // 16, 4, 2, 2)  # blocks of outputs, outputs, words, pairs, word, input
    return _halves_joined(parts.permute(0, 1, 4, 2, 3, 7, 5, 6).contiguous()).flatten(2)


def _mxfp4_order(codes: Tensor) -> Tensor:
    """Return codes in the order of Mxfp4Layout: 4 words of an input of an output share 2 bytes."""
    panels, inputs = len(codes), codes.shape[-1]
    parts = codes.view(panels, 2, HALF, inputs // 8, 2, 2, 2)  # outputs, blocks of words, pairs, word, input
    return _halves_joined(parts.permute(0, 1, 3, 2, 6, 4, 5).contiguous()).flatten(2)


def _fp8_order(codes: Tensor) -> Tensor:
    """Return codes in the order of Fp8Layout."""
    panels, inputs = len(codes), codes.shape[-1]
    parts = codes.view(panels, 2, 2, 8, inputs // 2, 2)  # blocks of outputs, outputs, words, input
    return parts.permute(0, 1, 4, 3, 5, 2).flatten(2)


FORMS = {
    "int4": FewBits(WeightForm.int4, 32, 4, 4, int4, _int4_order),
    "mxfp4": FewBits(WeightForm.mxfp4, 32, 1, 4, mxfp4, _mxfp4_order),
    "fp8": FewBits(WeightForm.fp8, 128, 4, 8, fp8, _fp8_order),
}
