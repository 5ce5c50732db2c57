"""Codes and scales of quantised weights as blocks that GEMMs take as they are (native/ops_cpu/blocks.h).

| blocks | what they hold |
|---|---|
| Q8_0, i8 | int8, or 5 to 7 bits less a zero point, times a scale: float16 for 32 inputs, or float32 for 128 or all |
| i4 | codes of 2 to 4 bits less a zero point, times a scale: both float16 for 32 inputs |
| f8 | FP8 times a float32 scale for 128 inputs or all |
| mx8, mx4 | FP8 and FP4 times a power of two for 32 inputs |
| nf4 | numbers of NormalFloat4 (QLoRA, arXiv:2305.14314) times a float32 scale for 64 inputs |
| nvfp4 | FP4 times an FP8 scale for 16 inputs and a float32 scale of the weight |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.bitsandbytes import FourBits, Int8Rows
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, BYTE, NIBBLE
from hpcdecode.model.frontend.quantization.formats import ScaleBlock, WeightFormat, WrongTensorsError, spread
from hpcdecode.model.frontend.quantization.gptq import PackedColumns
from hpcdecode.model.frontend.quantization.grids import Mxfp4Experts, PackedIntegers, ScaledGrid

Coded = PackedColumns | ScaledGrid | Int8Rows | Mxfp4Experts  # whose codes blocks hold as they are stored
Parts = Mapping[str, Tensor]
BlockRows = Callable[[int, int], Tensor]  # from one row up to the row before another: uint8 [rows, bytes]
MOST_SCALE = 128  # of FP8, which is 448 at most
MIDDLE = 0x80  # of codes of 8 bits that are stored without a sign
_FRACTION = 23  # bits of a float32
_log = logging.getLogger(__name__)


def block_parts(name: str, form: WeightFormat, stored: Parts, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return what `blocks_of` takes, made once of the tensors of a weight.

    Args:
        name: Type of the blocks, what `few_bits_of` named for the weight.
        form: The weight's format.
        stored: Its tensors by role.
        shape: Its shape.

    Raises:
        WrongTensorsError: If values of the tensors cannot be right.
    """
    parts = form.prepared(stored, shape)
    if name == "nvfp4":
        assert isinstance(form, ScaledGrid), "others have no scale of the whole weight"
        parts["scale"] = stored["scale"]
        parts["overall"] = form.overall(stored["overall"]).reshape(1, 1)
    if name in ("f8", "mx8") and (most := float(parts["scale"].max())) > MOST_SCALE:
        raise WrongTensorsError(f"expected scales of FP8 numbers up to {MOST_SCALE}, got {most}")
    if name == "i4" and (lost := int((parts["scale"].half().float() != parts["scale"]).sum())):
        _log.info(
            "float16 does not hold %d of %d scales of an int4 weight: they were rounded", lost, parts["scale"].numel()
        )
    return parts


def blocks_of(name: str, form: WeightFormat, parts: Parts, inputs: int, by_column: bool = False) -> BlockRows:
    """Return what makes the blocks of some outputs of a matrix.

    Args:
        name: Type of the blocks.
        form: The weight's format.
        parts: What `block_parts` made, of one matrix.
        inputs: Its inputs.
        by_column: Whether it is [in, out].
    """
    count = inputs // BLOCKS[name].inputs
    if isinstance(form, FourBits):
        return _nf4(parts, count)
    assert isinstance(form, Coded), "others are not held in blocks"
    if by_column and isinstance(form, ScaledGrid):
        turned = form.block and ScaleBlock(form.block.columns, form.block.rows)
        form, parts = replace(form, block=turned), {role: part.t() for role, part in parts.items()}
    if name == "nvfp4":
        return _nvfp4(form, parts, count)
    return _scaled(name, form, parts, count)


def _scaled(name: str, form: Coded, parts: Parts, count: int) -> BlockRows:
    """Return the same for blocks of codes behind what holds for all of them, `count` a row."""
    size, shared = BLOCKS[name], form.scale_block()

    def grid(role: str, first: int, last: int) -> Tensor:
        rows, columns = shared.rows or 1, shared.columns and shared.columns // size.inputs
        own = parts[role] if len(parts[role]) == 1 else parts[role][first // rows : -(-last // rows)]
        skipped = 0 if len(own) == 1 else first % rows
        wide = spread(own, ScaleBlock(shared.rows, columns), last - first + skipped, count)
        return wide[skipped:].expand(last - first, count)

    def codes(first: int, last: int) -> Tensor:
        if not isinstance(form, PackedColumns | PackedIntegers) or form.bits == NIBBLE:
            return in_blocks(form.stored(parts, first, last))
        if form.bits == BYTE:
            return in_blocks(form.stored(parts, first, last)) ^ MIDDLE
        each = in_blocks(form.codes(parts, first, last))
        if name == "i4":
            return each[..., ::2] | each[..., 1::2] << NIBBLE
        return (each.short() - grid("zero", first, last).short()[..., None]).to(torch.int8)

    def in_blocks(codes: Tensor) -> Tensor:
        of_blocks: Tensor = codes[:, : codes.shape[1] // count * count].unflatten(1, (count, -1))
        return of_blocks

    def rows(first: int, last: int) -> Tensor:
        heads = [_head(name, grid("scale", first, last))]
        if name == "i4":
            heads.append(grid("zero", first, last).half())
        return _joined(*heads, codes(first, last))

    return rows


def _head(name: str, scales: Tensor) -> Tensor:
    """Return scales [rows, blocks] as blocks hold them."""
    if name in ("mx4", "mx8"):
        return (scales.contiguous().view(torch.int32) >> _FRACTION).to(torch.uint8)
    return scales.half() if name in ("Q8_0", "i4") else scales


def _nf4(parts: Parts, count: int) -> BlockRows:
    columns, inputs_of_scale = parts["sizes"].tolist()
    starts, inputs = torch.arange(count), columns // count

    def rows(first: int, last: int) -> Tensor:
        codes = parts["codes"][first * columns // 2 : last * columns // 2].view(last - first, count, -1)
        scales = (torch.arange(first, last)[:, None] * columns + starts * inputs) // inputs_of_scale
        return _joined(parts["scale"][scales], codes)

    return rows


def _nvfp4(form: Coded, parts: Parts, count: int) -> BlockRows:
    def rows(first: int, last: int) -> Tensor:
        scales = parts["scale"][first:last].contiguous().view(torch.uint8).unflatten(1, (count, -1))
        return _joined(
            parts["overall"].expand(last - first, count),
            scales,
            form.stored(parts, first, last).unflatten(1, (count, -1)),
        )

    return rows


def _joined(*of_blocks: Tensor) -> Tensor:
    """Return numbers [rows, blocks] and bytes [rows, blocks, n] of each block side by side, uint8 [rows, bytes]."""
    numbers = (part.contiguous()[..., None] if part.ndim == 2 else part.contiguous() for part in of_blocks)
    return torch.cat([part.view(torch.uint8) for part in numbers], 2).flatten(1)
