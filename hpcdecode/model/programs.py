"""Token programs as graph calls: from tensors to the native program's rows and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Program
from hpcdecode.model.meta import Meta, dense_strides
from hpcdecode.model.rows import padded


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
        places = [(x.data_ptr(), step) for x, step in rows + made]
        self.program.run(count, torch.get_num_threads(), *zip(*places, strict=True))
        results = [about.shaped(x, count) for about, (x, _) in zip(self.outputs, made, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)


class Rows:
    """A tensor as rows of one token's elements, some bytes from each other, and back."""

    def __init__(self, about: Meta):
        self.dtype, self.dim = about.dtype, about.token_dim
        self.shape = about.one_token
        self.elements = math.prod(self.shape)
        self.bytes = self.elements * self.dtype.itemsize
        self.leads = self.dim is not None and math.prod(self.shape[: self.dim]) == 1
        self.strides = dense_strides(self.shape)

    def rows_of(self, x: Tensor, count: int) -> tuple[Tensor, int]:
        """The elements of a token dense, and the bytes from one token to the next; 0 for a weight."""
        dim = self.dim
        if dim is None:
            return x.view(-1), 0
        strides = x.stride()
        if self.leads and strides[dim + 1 :] == self.strides[dim + 1 :]:
            return x, strides[dim] * self.dtype.itemsize
        rows = (x if self.leads else x.movedim(dim, 0)).reshape(count, self.elements).contiguous()
        return rows, self.bytes

    def fresh(self, count: int) -> tuple[Tensor, int]:
        return torch.empty(padded(count) * self.elements, dtype=self.dtype), self.bytes

    def shaped(self, flat: Tensor, count: int) -> Tensor:
        if self.leads:
            shape = (*self.shape[: self.dim], count, *self.shape[self.dim + 1 :])
            return flat.as_strided(shape, (*(count * n for n in self.strides[: self.dim]), *self.strides[self.dim :]))
        rest = [n for d, n in enumerate(self.shape) if d != self.dim]
        return flat[: count * self.elements].view(count, *rest).movedim(0, self.dim)
