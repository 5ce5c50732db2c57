"""Random weights in every type of blocks that GEMMs take, and the numbers that they stand for."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.bitsandbytes import NF4_VALUES
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, GGUF_BLOCKS
from hpcdecode.model.frontend.quantization.grids import FP4_VALUES
from tests.support.gguf_files import KINDS, random_blocks


def random_weight(kind: str, outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Return a weight with every code, and scales of many sizes: uint8 [outputs, bytes]."""
    if kind in GGUF_BLOCKS:
        return torch.from_numpy(random_blocks(KINDS[kind], (outputs, inputs), np.random.default_rng(seed)))
    size, generator = BLOCKS[kind], torch.Generator().manual_seed(seed)
    count, sharing = inputs // size.inputs, {"i8": 128, "nf4": 64, "nvfp4": inputs}[kind] // size.inputs
    made = torch.randint(0, 256, (outputs, count, size.bytes), generator=generator, dtype=torch.uint8)
    most = {"i8": 128, "nf4": 1, "nvfp4": 6 * 448}[kind]
    scales = torch.randn(outputs, -(-count // sharing), generator=generator).exp() * 0.02 / most
    scales = scales.repeat_interleave(sharing, 1)[:, :count].contiguous()
    made[..., :4] = scales.view(torch.uint8).view(outputs, count, 4)
    if kind == "nvfp4":
        made[..., 4:6] = torch.where(made[..., 4:6] & 127 == 127, 1, made[..., 4:6])  # 127 is NaN, 1 subnormal
    return made.flatten(1)


def numbers_of(kind: str, blocks: Tensor) -> Tensor:
    """Return the numbers of a weight in blocks [outputs, bytes], float32 [outputs, inputs]."""
    if kind in GGUF_BLOCKS:
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), KINDS[kind]).astype(np.float32))
    each = blocks.unflatten(1, (-1, BLOCKS[kind].bytes))
    scale, rest = each[..., :4].contiguous().view(torch.float32), each[..., 4:]
    if kind == "i8":
        return (rest.contiguous().view(torch.int8).float() * scale).flatten(1)
    if kind == "nf4":
        codes = torch.stack([rest >> 4, rest & 15], -1).flatten(-2)
        return (torch.tensor(NF4_VALUES)[codes.int()] * scale).flatten(1)
    own = rest[..., :2].contiguous().view(torch.float8_e4m3fn).float() * scale
    codes = torch.stack([rest[..., 2:] & 15, rest[..., 2:] >> 4], -1).flatten(-2)
    return (torch.tensor(FP4_VALUES)[codes.int()] * own.repeat_interleave(16, -1)).flatten(1)
