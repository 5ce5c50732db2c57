"""Which quantised weights lie on a grid that GEMMs can take in few bits, so that they need not be dequantised.

The names are those of `model/lower/few_bits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hpcdecode.model.frontend.held import AS_STORED, NOT_HELD, Held
from hpcdecode.model.frontend.membership import WeightCut
from hpcdecode.model.frontend.quantization.bitsandbytes import FourBits, Int8Rows
from hpcdecode.model.frontend.quantization.formats import CHANNEL, ScaleBlock, WeightFormat
from hpcdecode.model.frontend.quantization.fp6 import fp6
from hpcdecode.model.frontend.quantization.gptq import PackedColumns
from hpcdecode.model.frontend.quantization.grids import Mxfp4Experts, PackedIntegers, ScaledGrid, fp4, fp8, integer
from hpcdecode.model.frontend.tensors import CheckpointTensor

HALVES = ("F16", "BF16")  # what float16 scales hold, bfloat16 ones if they are not tiny
POWERS = ("U8", "F8_E8M0")  # of two


class BlockSize(NamedTuple):
    """Size of the blocks of a type of GGUF.

    Attributes:
        inputs: Inputs of a block.
        bytes: Its bytes.
    """

    inputs: int
    bytes: int


GGUF_BLOCKS = {  # types of GGUF that GEMMs take as they are
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24),
    "Q8_0": BlockSize(32, 34),
    "Q2_K": BlockSize(256, 84),
    "Q3_K": BlockSize(256, 110),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
    "IQ4_NL": BlockSize(32, 18),
    "IQ4_XS": BlockSize(256, 136),
    "MXFP4": BlockSize(32, 17),
}
NIBBLE, BYTE = 4, 8  # bits that integers take: of fewer than 4 as many as those of 4
INT8_BLOCKS = "Q8_0"  # what holds integers of 5 to 8 bits, of other formats too
INT8_FLOAT32 = "i8"  # what does if float16 does not hold their scales
OWN_BLOCKS = {
    INT8_FLOAT32: BlockSize(32, 36),
    "nf4": BlockSize(64, 36),
    "nvfp4": BlockSize(32, 22),
    "i4": BlockSize(32, 20),
    "f8": BlockSize(32, 36),
    "mx4": BlockSize(32, 17),
    "mx8": BlockSize(32, 33),
}
BLOCKS = {**GGUF_BLOCKS, **OWN_BLOCKS}
GROUPS = dict.fromkeys(AS_STORED, 32) | {
    name: size.inputs for name, size in BLOCKS.items()
}  # inputs that share a scale
GROUPS |= {INT8_FLOAT32: 128, "f8": 128}


def few_bits_of(form: WeightFormat, parts: Mapping[str, CheckpointTensor], shape: tuple[int, ...]) -> Held:
    """Return what holds the numbers of a weight in few bits.

    Args:
        form: Its format.
        parts: The tensors that make it up, by role. Groups of inputs are read, of int8 some scales and zero points, and
            what bitsandbytes says of a weight.
        shape: Its shape.
    """
    if isinstance(form, Mxfp4Experts):
        return Held(None, "mx4")
    if blocks := _own_blocks(form, parts, shape) or _int8_blocks(form, parts, shape):
        return Held(blocks, None)
    found = _named(form, parts, shape)
    if found is None:
        return NOT_HELD
    name, block = found
    by_column = name if name in ("f8", "mx8") and _whole_groups(name, block.rows) else None
    return Held(name if _held_by_row(name, block, parts, shape) else None, by_column)


def _held_by_row(name: str, block: ScaleBlock, parts: Mapping[str, CheckpointTensor], shape: tuple[int, ...]) -> bool:
    if not _whole_groups(name, block.columns) or (name == "i4" and parts["scale"].dtype not in HALVES):
        return False
    if "group" not in parts:
        return True
    own = torch.arange(shape[1]) // (block.columns or shape[1])
    return torch.equal(parts["group"]().to(own.dtype), own)  # else inputs are permuted


def _own_blocks(form: WeightFormat, parts: Mapping[str, CheckpointTensor], shape: tuple[int, ...]) -> str | None:
    """Return nf4 or nvfp4 if that is what the numbers are."""
    if isinstance(form, FourBits):
        return "nf4" if form.is_nf4(parts, BLOCKS["nf4"].inputs) else None
    if not isinstance(form, ScaledGrid) or form.decoded is not fp4 or "overall" not in parts or len(shape) != 2:
        return None
    whole = form.block == ScaleBlock(1, 16) and shape[1] % BLOCKS["nvfp4"].inputs == 0
    return "nvfp4" if whole and parts["scale"].dtype == "F8_E4M3" else None


def _int8_blocks(form: WeightFormat, parts: Mapping[str, CheckpointTensor], shape: tuple[int, ...]) -> str | None:
    """Return what holds the numbers if they are int8 times scales, for at least 32 inputs each; else None.

    Integers of 5 to 7 bits less their zero points are int8.
    """
    if isinstance(form, Int8Rows):
        bits, block = BYTE, CHANNEL
    elif isinstance(form, PackedColumns):
        bits, block = form.bits, form.scale_block()
    elif isinstance(form, ScaledGrid) and (isinstance(form, PackedIntegers) or form.decoded is integer):
        bits = form.bits if isinstance(form, PackedIntegers) else BYTE
        block = form.block_of(parts["scale"].shape, shape)
    else:
        return None
    if bits <= NIBBLE or len(shape) != 2 or shape[1] % BLOCKS[INT8_BLOCKS].inputs or "overall" in parts:
        return None
    any_zero = bits < BYTE or "zero" not in parts
    if not any_zero and not (isinstance(form, PackedColumns) and form.is_centred(parts["zero"]())):
        return None
    halves = not isinstance(form, Int8Rows) and _are_halves(parts["scale"])
    name = INT8_BLOCKS if halves else INT8_FLOAT32
    return name if _held_by_row(name, block, parts, shape) else None


def _are_halves(stored: CheckpointTensor) -> bool:
    """Return whether float16 holds scales exactly."""
    if stored.dtype == "F16":
        return True
    scales = stored().to(torch.float32)
    return torch.equal(scales.half().to(torch.float32), scales)


def _whole_groups(name: str, inputs: int | None) -> bool:
    """Return whether so many inputs that share a scale, or all of them, are whole groups of a type of blocks."""
    return inputs is None or inputs % GROUPS[name] == 0


def keeps_groups(name: str, cut: WeightCut | None, in_dim: int) -> bool:
    """Return whether a cut takes whole groups of inputs of a weight, whose dimension `in_dim` counts inputs."""
    return cut is None or cut.dim != in_dim or all(end % GROUPS[name] == 0 for ends in cut.ranges for end in ends)


def cut_of_blocks(name: str, cut: WeightCut | None, by_column: bool = False) -> WeightCut | None:
    """Return what a cut of a weight takes of its blocks, uint8 [out, bytes]; the cut keeps whole blocks.

    Args:
        name: Type of the blocks.
        cut: What is taken of the weight [out, in].
        by_column: Whether that is [in, out].
    """
    if cut is None:
        return None
    if (cut.dim == 0) is not by_column:
        return cut._replace(dim=0)
    size = BLOCKS[name]
    ends = [tuple(end // size.inputs * size.bytes for end in ends) for ends in cut.ranges]
    return cut._replace(dim=1, size=cut.size // size.inputs * size.bytes, ranges=tuple((a, b) for a, b in ends))


def _named(
    form: WeightFormat, parts: Mapping[str, CheckpointTensor], shape: tuple[int, ...]
) -> tuple[str, ScaleBlock] | None:
    """Return a type of blocks, and which elements share a scale; None if there is none."""
    if isinstance(form, PackedColumns):
        return ("i4", form.scale_block()) if form.bits <= NIBBLE else None
    if not isinstance(form, ScaledGrid) or "overall" in parts:
        return None
    block = form.block_of(parts["scale"].shape, shape)
    if isinstance(form, PackedIntegers):
        return ("i4", block) if form.bits <= NIBBLE else None
    if "zero" in parts:
        return None
    if form.decoded in (fp8, fp6):
        return "mx8" if parts["scale"].dtype in POWERS else "f8", block
    return ("mx4", block) if form.decoded is fp4 and block == ScaleBlock(1, 32) else None
