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
    if kind in GGUF_BLOCKS and kind != "MXFP4":
        return torch.from_numpy(random_blocks(KINDS[kind], (outputs, inputs), np.random.default_rng(seed)))
    size, generator = BLOCKS[kind], torch.Generator().manual_seed(seed)
    count = inputs // size.inputs
    made = torch.randint(0, 256, (outputs, count, size.bytes), generator=generator, dtype=torch.uint8)
    if kind in ("f8", "mx8"):
        codes = made[..., 4 if kind == "f8" else 1 :]
        codes[codes & 127 == 127] = 1  # 127 is NaN, 1 subnormal
    if kind in ("MXFP4", "mx4", "mx8"):
        made[..., 0] = torch.randint(110, 124, (outputs, count), generator=generator) - (9 if kind == "mx8" else 0)
        return made.flatten(1)
    sharing = {"i8": 128, "f8": 128, "nf4": 64, "nvfp4": inputs, "i4": 32}[kind] // size.inputs
    most = {"i8": 128, "f8": 448, "nf4": 1, "nvfp4": 6 * 448, "i4": 16}[kind]
    scales = torch.randn(outputs, -(-count // sharing), generator=generator).exp() * 0.02 / most
    scales = scales.repeat_interleave(sharing, 1)[:, :count].contiguous()
    if kind == "i4":
        zeros = torch.randint(0, 17, scales.shape, generator=generator)
        scales = torch.stack([scales.half(), zeros.half()], -1)
    made[..., :4] = scales.view(torch.uint8).view(outputs, count, 4)
    if kind == "nvfp4":
        made[..., 4:6] = torch.where(made[..., 4:6] & 127 == 127, 1, made[..., 4:6])
    return made.flatten(1)


def numbers_of(kind: str, blocks: Tensor) -> Tensor:
    """Return the numbers of a weight in blocks [outputs, bytes], float32 [outputs, inputs]."""
    if kind in GGUF_BLOCKS:
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), KINDS[kind]).astype(np.float32))
    each = blocks.unflatten(1, (-1, BLOCKS[kind].bytes))
    if kind in ("mx4", "mx8"):
        codes = each[..., 1:].contiguous()
        numbers = codes.view(torch.float8_e4m3fn).float() if kind == "mx8" else fp4(codes)
        return torch.ldexp(numbers, each[..., :1].int() - 127).flatten(1)
    scale, rest = each[..., :4].contiguous().view(torch.float32), each[..., 4:].contiguous()
    if kind == "i8":
        return (rest.view(torch.int8).float() * scale).flatten(1)
    if kind == "f8":
        return (rest.view(torch.float8_e4m3fn).float() * scale).flatten(1)
    if kind == "i4":
        of_block, zero = each[..., :4].contiguous().view(torch.float16).float().split(1, -1)
        return ((nibbles(rest) - zero) * of_block).flatten(1)
    if kind == "nf4":
        codes = torch.stack([rest >> 4, rest & 15], -1).flatten(-2)
        return (torch.tensor(NF4_VALUES)[codes.int()] * scale).flatten(1)
    own = rest[..., :2].contiguous().view(torch.float8_e4m3fn).float() * scale
    return (fp4(rest[..., 2:]) * own.repeat_interleave(16, -1)).flatten(1)


def nibbles(codes: Tensor) -> Tensor:
    """Return the two halves of each byte [..., n], the lower one first: [..., 2 n]."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def fp4(codes: Tensor) -> Tensor:
    """Return the FP4 numbers in bytes [..., n], float32 [..., 2 n]."""
    return torch.tensor(FP4_VALUES)[nibbles(codes).int()]
