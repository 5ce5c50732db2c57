"""Graphs of slices with random inputs."""

from __future__ import annotations

import torch
from torch import fx

from hpcdecode.model.lower.compile import Compiled, compile_graph


def both_ways(graph: fx.Graph, device: torch.device) -> tuple[Compiled, tuple, tuple]:
    """The compiled graph, and what the plain one and it make of the same random numbers."""
    generator = torch.Generator().manual_seed(2)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    values = [example(n, generator) for n in inputs]
    compiled = compile_graph(graph, device)
    given = [v for n, v in zip(inputs, values, strict=True) if n.name.startswith("x")]
    weights = compiled.weights([v for n, v in zip(inputs, values, strict=True) if n.name.startswith("w")].__getitem__)
    with torch.inference_mode():
        return compiled, fx.GraphModule({}, graph)(*values), compiled.run(*given, *weights)


def example(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the node's type, for 11 tokens of which 4 are kept; weights as large as trained ones."""
    about = node.meta["about"]
    shape = [{"T": 11, "L": 4}.get(n, n) for n in about.shape]
    if about.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=about.dtype)
    if not about.dtype.is_floating_point:
        return torch.randint(0, 4, shape, generator=generator, dtype=about.dtype)
    scale = about.shape[-1] ** -0.5 if about.static and len(shape) == 2 else 1.0
    return (torch.randn(shape, generator=generator) * scale).to(about.dtype)
