"""A layer of experts for `hpcdecode bench products`: packed weights against torch's products, one expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode.bench.output import Case
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.experts import ExpertGemm
from hpcdecode.model.lower.few_bits import FORMS
from hpcdecode.report.benchmark import case, seconds_of


class ExpertShape(NamedTuple):
    """A projection by experts.

    Attributes:
        experts: Number of experts.
        choices: Experts of a token.
        inputs: Inputs of each.
        outputs: Outputs of each.
    """

    experts: int
    choices: int
    inputs: int
    outputs: int


def measure_experts(shape: ExpertShape, token_counts: list[int], passes: int) -> Iterator[Case]:
    """Yield bfloat16 against torch, and int8 and weights in few bits against bfloat16, for random choices of experts.

    Args:
        shape: The projection.
        token_counts: Numbers of tokens to measure.
        passes: Passes of each side, in turn.
    """
    weight = torch.randn(shape.experts, shape.outputs, shape.inputs).bfloat16()
    forms: list[str | None] = [None, "int8", *FORMS]
    sides = {bits or "bfloat16": PackedExperts(shape, weight, bits) for bits in forms}
    for tokens in token_counts:
        x = torch.randn(tokens, 1, shape.inputs).bfloat16()
        chosen = torch.rand(tokens, shape.experts).topk(shape.choices).indices
        calls = {name: partial(side, x, chosen) for name, side in sides.items()}
        calls["torch"] = partial(expert_linear, x, chosen, weight, None, False)
        seconds = [[seconds_of(call) for call in calls.values()] for _ in range(passes + 1)]
        taken = dict(zip(calls, zip(*seconds[1:], strict=True), strict=True))
        work = 2e-9 * tokens * shape.choices * shape.inputs * shape.outputs
        for name in sides:
            against = "torch" if name == "bfloat16" else "bfloat16"
            ratios = [theirs / ours for ours, theirs in zip(taken[name], taken[against], strict=True)]
            title = f"experts, {name}, {tokens} tokens"
            yield case(title, [work / s for s in taken[name]], "GOP/s", against, ratios)


class PackedExperts:
    """A projection by experts whose weights are packed in a form: "int8", one of FORMS, or None for bfloat16."""

    def __init__(self, shape: ExpertShape, weight: Tensor, bits: str | None):
        dtype = torch.int8 if bits == "int8" else torch.bfloat16
        x, y = (Meta.of(torch.bfloat16, ("T", n, m)) for n, m in ((1, shape.inputs), (shape.choices, shape.outputs)))
        few = None if bits == "int8" else bits
        self._gemm = ExpertGemm(Meta.of(dtype, x.shape), Meta.of(dtype, tuple(weight.shape)), y, 0, None, few)

        def rows(own: Tensor) -> packed_weights.WeightRows:
            if dtype == torch.int8:
                return packed_weights.int8_rows(*quantize.RoundedWeight.of(own))
            return packed_weights.plain_rows([own], None)

        self._weight = packed_weights.packed(self._gemm.packed, lambda: map(rows, weight), bits=few)
        self._dtype = dtype

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the products; int8 activations are any numbers, as their rounding is not measured."""
        return self._gemm(x if self._dtype == x.dtype else x.to(torch.int8), chosen, self._weight)
