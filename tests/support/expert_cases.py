"""Layers of experts in random numbers, one expert at a time and in grouped GEMMs, on any device."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx
from torch.nn import functional

from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.lower.compile import Compiled
from hpcdecode.model.lower.grouped_products import expert_order, expert_product, rows_by_token

NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 4e-3}  # of the largest number
SHAPES = ((160, 48), (40, 80))  # outputs and inputs of gate and up together, and of down


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """A layer of experts: gate and up in one projection, an activation, down; perhaps of a member's own experts."""

    def __init__(self, dtype, experts, first=0, own=None, transposed=False, biased=False, shapes=SHAPES):
        self.experts, self.first, self.own, self.transposed = experts, first, own or experts, transposed
        self.weights = [numbers(dtype, self.own, *s, seed=i) / s[1] ** 0.5 for i, s in enumerate(shapes)]
        self.biases = [numbers(dtype, self.own, s[0], seed=i + 9) if biased else None for i, s in enumerate(shapes)]
        self.weights = [w.mT.contiguous() if transposed else w for w in self.weights]

    def to(self, device: str) -> Case:
        """The same on a device."""
        made = copy.copy(self)
        made.weights = [w.to(device) for w in self.weights]
        made.biases = [None if b is None else b.to(device) for b in self.biases]
        return made

    def chosen(self, tokens: int, choices: int, most: int | None = None) -> Tensor:
        drawn = torch.rand(tokens, most or self.experts, generator=torch.Generator().manual_seed(tokens))
        return drawn.topk(choices).indices

    def plain(self, x: Tensor, expert: Tensor) -> Tensor:
        """The layer, one expert at a time; in float64 if x is."""
        (up, down), biases = ([None if t is None else t.to(x.dtype) for t in ts] for ts in (self.weights, self.biases))
        rows = expert_linear(x, expert, up, biases[0], self.transposed, self.first)
        return expert_linear(activated(rows), expert, down, biases[1], self.transposed, self.first)

    def grouped(self, x: Tensor, expert: Tensor) -> Tensor:
        chosen, order, ends = expert_order(expert, self.own, self.first)
        (up, down), (up_bias, down_bias) = self.weights, self.biases
        rows = expert_product(x, chosen, order, ends, up, up_bias, self.transposed, False)
        made = expert_product(activated(rows), chosen, order, ends, down, down_bias, self.transposed, True)
        return rows_by_token(made, order, ends, self.own == self.experts)


def activated(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return functional.silu(gate) * up


def inputs_of(compiled: Compiled, graph: fx.Graph, values: list[Tensor]) -> list[Tensor]:
    """What a compiled graph takes, of values for the placeholders of the graph that it was made of."""
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    given = [x for name, x in zip(names, values, strict=True) if not name.startswith("w")]
    weights = [x for name, x in zip(names, values, strict=True) if name.startswith("w")]
    return [*given, *compiled.weights(lambda number, blocks=False: weights[number])]
