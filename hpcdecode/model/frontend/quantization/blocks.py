"""Codes and scales of quantised weights as blocks that GEMMs take as they are (native/ops_cpu/blocks.h).

| blocks | what they hold |
|---|---|
| Q8_0, i8 | int8 times a scale: float16 for 32 inputs, or float32 for 128 or all |
| nf4 | numbers of NormalFloat4 (QLoRA, arXiv:2305.14314) times a float32 scale for 64 inputs |
| nvfp4 | FP4 times an FP8 scale for 16 inputs and a float32 scale of the weight |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.bitsandbytes import FourBits, Int8Rows
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, INT8_BLOCKS
from hpcdecode.model.frontend.quantization.formats import WeightFormat
from hpcdecode.model.frontend.quantization.gptq import PackedColumns
from hpcdecode.model.frontend.quantization.grids import ScaledGrid

Parts = Mapping[str, Tensor]
BlockRows = Callable[[int, int], Tensor]  # from one row up to the row before another: uint8 [rows, bytes]


def blocks_of(name: str, form: WeightFormat, parts: Parts, shape: tuple[int, ...]) -> BlockRows:
    """Return what makes the blocks of some rows of a weight.

    Args:
        name: Type of the blocks, what `few_bits_of` named for the weight.
        form: The weight's format.
        parts: Its tensors by role.
        shape: Its shape, [out, in].

    Raises:
        WrongTensorsError: If values of the tensors cannot be right.
    """
    prepared = form.prepared(parts, shape)
    if isinstance(form, FourBits):
        return _nf4(prepared, shape[1] // BLOCKS[name].inputs)
    if name == "nvfp4":
        assert isinstance(form, ScaledGrid), "others have no scale of the whole weight"
        return _nvfp4(form, parts, shape[1] // BLOCKS[name].inputs)
    assert isinstance(form, PackedColumns | ScaledGrid | Int8Rows), "others are not int8"
    return _integers(name, form, prepared, shape[1])


def _integers(name: str, form: PackedColumns | ScaledGrid | Int8Rows, parts: Parts, columns: int) -> BlockRows:
    inputs = BLOCKS[name].inputs

    def rows(first: int, last: int) -> Tensor:
        scales = form.scales(parts, first, last, columns).expand(last - first, columns)
        codes = (form.rows(parts, first, last) / scales).nan_to_num_().round_().to(torch.int8)  # 0 / 0 is 0
        own = scales[:, ::inputs]
        return _joined(own.half() if name == INT8_BLOCKS else own, codes.unflatten(1, (-1, inputs)))

    return rows


def _nf4(parts: Parts, count: int) -> BlockRows:
    """Return the same for `count` blocks a row."""
    columns, inputs_of_scale = parts["sizes"].tolist()
    starts, inputs = torch.arange(count), columns // count

    def rows(first: int, last: int) -> Tensor:
        codes = parts["codes"][first * columns // 2 : last * columns // 2].view(last - first, count, -1)
        scales = (torch.arange(first, last)[:, None] * columns + starts * inputs) // inputs_of_scale
        return _joined(parts["scale"][scales], codes)

    return rows


def _nvfp4(form: ScaledGrid, parts: Parts, count: int) -> BlockRows:
    """Return the same for `count` blocks a row."""
    overall = form.overall(parts["overall"]).reshape(1, 1)

    def rows(first: int, last: int) -> Tensor:
        scales, codes = (
            parts[role][first:last].contiguous().view(torch.uint8).unflatten(1, (count, -1))
            for role in ("scale", "codes")
        )
        return _joined(overall.expand(last - first, count), scales, codes)

    return rows


def _joined(scales: Tensor, *of_blocks: Tensor) -> Tensor:
    """Return a scale [rows, blocks] before other bytes [rows, blocks, n] of each block, uint8 [rows, bytes]."""
    first = scales.contiguous().view(torch.uint8).view(*scales.shape, -1)
    return torch.cat([first, *(part.contiguous().view(torch.uint8) for part in of_blocks)], 2).flatten(1)
