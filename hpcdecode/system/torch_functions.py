"""Elementwise functions of torch that give their own bits from the first call of a process on.

On x86-64, torch calls Intel MKL for them. MKL (2024.2, which torch 2.13 brings) looks for a function's kernel in that
function's first call. Where several threads make it at once, one of them may run a kernel of low accuracy: errors of
up to 4,000 units in the last place, in that call only (pytorch/pytorch issue 188792).
"""

from __future__ import annotations

from functools import cache

import torch

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log"),
    *("log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


@cache
def settle_functions() -> None:
    """Call each function once in this thread, before several threads of the process can."""
    for dtype in (torch.float32, torch.float64):
        few = torch.full((8,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(few)
