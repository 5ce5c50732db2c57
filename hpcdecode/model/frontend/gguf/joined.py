"""Matrices of the checkpoint whose rows GGUF files hold as several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.names import Layout
from hpcdecode.model.frontend.gguf.tensors import GgufTensor
from hpcdecode.model.frontend.held import NOT_HELD, Held


class JoinedTensor:
    """A matrix whose rows are those of its parts.

    Args:
        key: Its key in the checkpoint.
        parts: The parts, [rows, columns] or [matrices, rows, columns].
        layout: How their rows make it up.

    Attributes:
        mapped: File that holds the first part.
        dtype: Name of its dtype in safetensors.
        shape: Its shape.

    Raises:
        UserError: If the parts do not fit the layout.
    """

    __slots__ = ("_layout", "_parts", "dtype", "mapped", "shape")

    def __init__(self, key: str, parts: Sequence[GgufTensor], layout: Layout):
        self._parts, self._layout, self.mapped, self.dtype = parts, layout, parts[0].mapped, parts[0].dtype
        turned = [(*p.shape[:-2], *p.shape[:-3:-1]) if i in layout.turned else p.shape for i, p in enumerate(parts)]
        rows = [torch.Size(shape[:-1]).numel() for shape in turned]
        runs = [run for count, own in zip_longest(rows, layout.runs) for run in own or (count,)]
        columns = {shape[-1] for shape in turned if len(shape) > 1}
        fit = all(sum(own) == count for own, count in zip(layout.runs, rows, strict=False))
        if not fit or len(columns) != 1 or layout.groups < 1 or any(run % layout.groups for run in runs):
            raise UserError(
                f"{self.mapped.file}: expected tensors of {key!r} whose rows are in {layout.groups} groups, got "
                f"{' and '.join(str(list(p.shape)) for p in parts)}; copy the file again"
            )
        self.shape = (sum(rows), columns.pop())

    def __call__(self) -> Tensor:
        """Dequantise it."""
        return self._joined([part() for part in self._parts])

    def few_bits(self) -> Held:
        """Return what holds the numbers of all parts in few bits."""
        held, *others = {part.few_bits() for part in self._parts}
        return NOT_HELD if others else held

    def blocks(self) -> Tensor:
        """Return its blocks, uint8 [out, bytes], if its `few_bits` name them."""
        return self._joined([part.blocks() for part in self._parts])

    def sample(self) -> Tensor:
        """Return some of the rows in float32."""
        return torch.cat([part.sample() for part in self._parts])

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of the parts in the order of the checkpoint."""
        runs: list[Tensor] = []
        for i, (part, own) in enumerate(zip_longest(parts, self._layout.runs)):
            turned = part.mT if i in self._layout.turned else part
            rows = turned.reshape(-1, turned.shape[-1])
            runs += rows.split(own) if own else (rows,)
        grouped = [run.reshape(self._layout.groups, -1, run.shape[-1]) for run in runs]
        return torch.cat(grouped, 1).flatten(0, 1)
