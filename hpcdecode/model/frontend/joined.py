"""Weights that are several tensors of a checkpoint, one below the other, such as tables in shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcdecode.model.frontend.tensors import CheckpointTensor
from hpcdecode.system.shared_memory import WeightMemory

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def joined(tensors: Sequence[CheckpointTensor], dtype: torch.dtype, memory: WeightMemory) -> Tensor:
    """Return tensors one below the other, read one after the other, so that only the result takes memory.

    Args:
        tensors: The tensors, whose other dimensions are equal.
        dtype: Data type of the result.
        memory: Where to put it.
    """
    shape = joined_shape([tensor.shape for tensor in tensors])

    def fill(made: Tensor) -> None:
        parts = made.view(dtype).view(shape).split([tensor.shape[0] for tensor in tensors])
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor())
            tensor.mapped.forget_pages()

    return memory.filled(math.prod(shape) * dtype.itemsize, fill).view(dtype).view(shape)


def joined_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of tensors of `shapes` one below the other, or () if they do not fit."""
    columns = {tuple(shape[1:]) for shape in shapes}
    return (sum(shape[0] for shape in shapes), *columns.pop()) if len(columns) == 1 else ()
