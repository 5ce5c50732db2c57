"""Weights of all experts in one tensor of the checkpoint, which GGUF files hold as tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdecode.model.frontend.gguf.names import Experts
from hpcdecode.model.frontend.gguf.tensors import GgufTensor
from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.quantization.few_bits import GGUF_BLOCKS


class ExpertTensor:
    """A weight [E, out, in] or [E, in, out], or a bias [E, out], of experts, whose outputs are those of its parts.

    Args:
        experts: For each expert its parts, [out_i, in] or [out_i], all of one shape.
        whole: How the parts make it up.

    Attributes:
        pieces: For each expert its parts, if its matrix is those, one behind the other; else None.
        mapped: File that holds the first part.
        dtype: Name of its dtype in safetensors.
        shape: Its shape.
    """

    __slots__ = ("_experts", "_whole", "dtype", "mapped", "pieces", "shape")

    def __init__(self, experts: Sequence[Sequence[GgufTensor]], whole: Experts):
        first = experts[0][0]
        outputs, *inputs = first.shape
        self._experts, self._whole, self.mapped, self.dtype = experts, whole, first.mapped, first.dtype
        outputs *= len(experts[0])
        self.shape = (len(experts), *inputs, outputs) if whole.by_column else (len(experts), outputs, *inputs)
        self.pieces = None if whole.interleaved or whole.by_column else experts

    def __call__(self) -> Tensor:
        """Dequantise it."""
        return torch.stack([self._matrix(e) for e in range(len(self._experts))])

    def matrices(self) -> Callable[[int], Tensor]:
        """Return what computes one expert's matrix, by its number."""
        return self._matrix

    def few_bits(self) -> Held:
        """Return what holds its numbers in few bits: GEMMs take blocks of GGUF by row, and so not those by column."""
        held, *others = {part.few_bits() for part in self._experts[0]}  # those of all experts are of its types
        if others or len(self.shape) != 3:
            return NOT_HELD
        if self.pieces is not None:
            return held
        return NOT_HELD if held.by_row in GGUF_BLOCKS or not self._whole.by_column else Held(None, held.by_row)

    def _matrix(self, expert: int) -> Tensor:
        parts = [part() for part in self._experts[expert]]
        matrix = torch.stack(parts, 1).flatten(0, 1) if self._whole.interleaved else torch.cat(parts)
        return matrix.t() if self._whole.by_column else matrix
