"""Weights of all experts in one tensor of the checkpoint, which GGUF files hold as tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdecode.model.frontend.gguf.names import Experts
from hpcdecode.model.frontend.gguf.tensors import GgufTensor
from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.stack import Pieces


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
        """Return what holds its numbers in few bits."""
        held, *others = {part.few_bits() for part in self._experts[0]}  # those of all experts are of its types
        if others or len(self.shape) != 3:
            return NOT_HELD
        return Held(None, held.by_row) if self._whole.by_column else Held(held.by_row, None)

    def expert_blocks(self, _: bool = False) -> Callable[[int], tuple[Pieces, Tensor]]:
        """Return what gives the blocks of an expert, uint8 [out_i, bytes], and some of its numbers, by its number."""

        def of(e: int) -> tuple[Pieces, Tensor]:
            parts = self._experts[e]
            return self._pieces([part.blocks() for part in parts]), torch.cat([part.sample() for part in parts])

        return of

    def _matrix(self, expert: int) -> Tensor:
        pieces = self._pieces([part() for part in self._experts[expert]])
        matrix = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return matrix.t() if self._whole.by_column else matrix

    def _pieces(self, parts: list[Tensor]) -> Pieces:
        """Return parts [out_i, n] whose rows are those of the matrix one behind the other."""
        return (torch.stack(parts, 1).flatten(0, 1),) if self._whole.interleaved else tuple(parts)
