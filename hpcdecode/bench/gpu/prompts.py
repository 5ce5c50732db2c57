"""The first day's proof that prompts of new lengths need no planning by a library."""

from __future__ import annotations

import random
import statistics

import torch

from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench.device_clock import seconds_of_all
from hpcdecode.bench.gpu.findings import Conditions, Findings

_SHAPE = LayerShape(8, 128, 128, 32, 128**-0.5)
_MOST = 0.01  # seconds that a new length may cost: cuDNN plans for 0.023 and more


def prompts(on: Conditions, findings: Findings) -> None:
    """Attend for prompts of 300 lengths, each twice: the first time takes about as long as the second."""
    count, longest = (12, 64) if on.emulated else (300, 2048)
    lengths = random.Random(0).sample(range(2, longest), count)
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(longest, _SHAPE.row_columns, generator=g).bfloat16().to(on.device)
    q, k, v = qkv.split([_SHAPE.q_columns, _SHAPE.k_columns, _SHAPE.v_columns], 1)
    out = torch.empty(longest, _SHAPE.out_columns, dtype=qkv.dtype, device=on.device)
    attention = TorchPromptAttention([_SHAPE], qkv.dtype, on.device)
    memory = torch.empty(attention.packed_bytes(0, longest), dtype=torch.uint8, device=on.device)

    def seconds(n: int) -> float:
        return seconds_of_all(lambda: attention.attend(0, [memory], [0], [n], q[:n], k[:n], v[:n], out[:n]), on.device)

    with torch.inference_mode():
        seconds(longest)  # loads the kernels
        first, second = [], []
        for n in lengths:
            first.append(seconds(n))
            second.append(seconds(n))
    extra = sorted(a - b for a, b in zip(first, second, strict=True))
    findings.note("median ms of the first and the second time", [1e3 * statistics.median(x) for x in (first, second)])
    findings.note("largest ms of a new length", 1e3 * extra[-1])
    median, whole = extra[count // 2], sum(first)
    if on.emulated:
        return
    findings.check(f"median seconds that {count} new lengths add", f"<= {_MOST}", median, median <= _MOST)
    findings.check(f"seconds of {count} new lengths", f"<= {_MOST} each", whole, whole <= _MOST * count)
