"""Weights of all experts in one tensor of the checkpoint (gpt-oss), which GGUF files hold as tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdecode.model.frontend.gguf.tensors import GgufTensor
from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.quantization.few_bits import GGUF_BLOCKS


class InterleavedExperts:
    """A weight [E, in, out] or bias [E, out] of experts, whose outputs are those of its parts in turn.

    Args:
        experts: For each expert its parts, [out_i, in] or [out_i], all of one shape.

    Attributes:
        mapped: File that holds the first part.
        dtype: Name of its dtype in safetensors.
        shape: Its shape.
    """

    __slots__ = ("_experts", "dtype", "mapped", "shape")

    def __init__(self, experts: Sequence[Sequence[GgufTensor]]):
        first = experts[0][0]
        outputs, *inputs = first.shape
        self._experts, self.mapped, self.dtype = experts, first.mapped, first.dtype
        self.shape = (len(experts), *inputs, len(experts[0]) * outputs)

    def __call__(self) -> Tensor:
        """Dequantise it."""
        return torch.stack([self._matrix(e) for e in range(len(self._experts))])

    def matrices(self) -> Callable[[int], Tensor]:
        """Return what computes one expert's matrix, by its number."""
        return self._matrix

    def few_bits(self) -> Held:
        """Return what holds its numbers in few bits: GEMMs take blocks of GGUF by row, and these lie by column."""
        (name, *others) = {part.few_bits().by_row for part in self._experts[0]}  # those of all experts are of its types
        return NOT_HELD if others or name in GGUF_BLOCKS or len(self.shape) != 3 else Held(None, name)

    def _matrix(self, expert: int) -> Tensor:
        parts = [part() for part in self._experts[expert]]
        return torch.stack(parts, 1).flatten(0, 1).t()
