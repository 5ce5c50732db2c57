"""Token programs as graph calls: from tensors to the native program's rows and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Program
from hpcdecode.model.meta import Meta
from hpcdecode.model.rows import empty_rows


class TokenProgram:
    """A call of a native program: takes `inputs`, rows of tokens first, then weights; returns `outputs`."""

    __module__ = __name__

    def __init__(self, program: Program, inputs: list[Meta], outputs: list[Meta]):
        self.program = program
        self.inputs = [Rows(about) for about in inputs]
        self.outputs = [Rows(about) for about in outputs]
        self.__name__ = f"program_{id(self)}"

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        count = tensors[0].shape[self.inputs[0].dim]
        rows = [about.rows_of(x, count) for about, x in zip(self.inputs, tensors, strict=True)]
        made = [about.fresh(count) for about in self.outputs]
        every = rows + made
        self.program.run(
            count,
            torch.get_num_threads(),
            [x.data_ptr() for x in every],
            [x.stride(0) * x.element_size() if x.dim() == 2 else 0 for x in every],
        )
        results = [about.shaped(x, count) for about, x in zip(self.outputs, made, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)


class Rows:
    """A tensor as rows [tokens, elements], and back."""

    def __init__(self, about: Meta):
        self.dtype, self.dim = about.dtype, about.token_dim
        self.shape = about.one_token
        self.elements = math.prod(self.shape)
        self.leads = self.dim is not None and math.prod(self.shape[: self.dim]) == 1

    def rows_of(self, x: Tensor, count: int) -> Tensor:
        if self.dim is None:
            return x.view(-1)
        rows = (x if self.leads else x.movedim(self.dim, 0)).reshape(count, self.elements)
        return rows if rows.stride(1) == 1 or self.elements == 1 else rows.contiguous()

    def fresh(self, count: int) -> Tensor:
        return empty_rows(count, self.elements, self.dtype)

    def shaped(self, rows: Tensor, count: int) -> Tensor:
        if self.leads:
            shape = list(self.shape)
            shape[self.dim] = count
            return rows.view(shape)
        rest = [n for d, n in enumerate(self.shape) if d != self.dim]
        return rows.view(count, *rest).movedim(0, self.dim)
