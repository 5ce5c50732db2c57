"""Which quantised weights lie on a grid that GEMMs can take in few bits, so that they need not be dequantised.

The names are those of `model/lower/few_bits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hpcdecode.model.frontend.membership import WeightCut
from hpcdecode.model.frontend.quantization.formats import ScaleBlock, WeightFormat
from hpcdecode.model.frontend.quantization.gptq import PackedColumns
from hpcdecode.model.frontend.quantization.grids import Mxfp4Experts, PackedIntegers, ScaledGrid, fp4, fp8
from hpcdecode.model.frontend.tensors import CheckpointTensor

HALVES = ("F16", "BF16")  # what float16 scales hold, bfloat16 ones if they are not tiny


class BlockSize(NamedTuple):
    """Size of the blocks of a type of GGUF.

    Attributes:
        inputs: Inputs of a block.
        bytes: Its bytes.
    """

    inputs: int
    bytes: int


BLOCKS = {  # types of GGUF that GEMMs take as they are
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q8_0": BlockSize(32, 34),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
}
GROUPS = {"int4": 32, "mxfp4": 32, "fp8": 128, **{name: size.inputs for name, size in BLOCKS.items()}}
"""Inputs that share a scale there, by name."""


def few_bits_of(form: WeightFormat, parts: Mapping[str, CheckpointTensor], shape: tuple[int, ...]) -> str | None:
    """Return what holds the numbers of a weight in few bits, or None.

    Args:
        form: Its format.
        parts: The tensors that make it up, by role; only groups of inputs are read.
        shape: Its shape.
    """
    if isinstance(form, Mxfp4Experts):
        return "mxfp4"
    found = _named(form, parts)
    if found is None or len(shape) != 2:
        return None
    name, columns = found
    if columns is not None and columns % GROUPS[name]:
        return None
    if name == "int4" and parts["scale"].dtype not in HALVES:
        return None
    if "group" in parts:
        own = torch.arange(shape[1]) // (columns or shape[1])
        return name if torch.equal(parts["group"]().to(own.dtype), own) else None  # else inputs are permuted
    return name


def keeps_groups(name: str, cut: WeightCut | None, in_dim: int) -> bool:
    """Return whether a cut takes whole groups of inputs of a weight, whose dimension `in_dim` counts inputs."""
    return cut is None or cut.dim != in_dim or all(end % GROUPS[name] == 0 for ends in cut.ranges for end in ends)


def cut_of_blocks(name: str, cut: WeightCut | None) -> WeightCut | None:
    """Return what a cut of a weight [out, in] takes of its blocks, uint8 [out, bytes]; the cut keeps whole blocks."""
    if cut is None or cut.dim == 0:
        return cut
    size = BLOCKS[name]
    ends = [tuple(end // size.inputs * size.bytes for end in ends) for ends in cut.ranges]
    return cut._replace(size=cut.size // size.inputs * size.bytes, ranges=tuple((a, b) for a, b in ends))


def _named(form: WeightFormat, parts: Mapping[str, object]) -> tuple[str, int | None] | None:
    """Return a form in few bits, and how many inputs share a scale, None for all; None if there is none."""
    if isinstance(form, PackedColumns):
        return ("int4", form.group_size) if form.bits == 4 else None
    if not isinstance(form, ScaledGrid) or "overall" in parts:
        return None
    columns = form.block.columns if form.block else None
    if isinstance(form, PackedIntegers):
        return ("int4", columns) if form.bits == 4 else None
    if "zero" in parts:
        return None
    if form.decoded is fp8:
        return "fp8", columns
    return ("mxfp4", columns) if form.decoded is fp4 and form.block == ScaleBlock(1, 32) else None
