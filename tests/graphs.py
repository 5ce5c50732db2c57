"""Inputs for the graphs of slices."""

from __future__ import annotations

import torch
from torch import fx


def example(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the node's type, for 11 tokens of which 4 are kept; weights as large as trained ones."""
    about = node.meta["about"]
    shape = [{"T": 11, "L": 4}.get(n, n) for n in about.shape]
    if not about.dtype.is_floating_point:
        return torch.randint(0, 4, shape, generator=generator, dtype=about.dtype)
    scale = about.shape[-1] ** -0.5 if about.static and len(shape) == 2 else 1.0
    return (torch.randn(shape, generator=generator) * scale).to(about.dtype)
