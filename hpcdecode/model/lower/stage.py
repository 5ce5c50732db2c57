"""What chains are made of, token programs and products, as targets of a graph's calls; tensors as rows of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Product, Program
from hpcdecode.model.frontend.meta import Meta, dense_strides
from hpcdecode.model.frontend.rows import padded


@dataclass(eq=False)
class Stage:
    """Native work on `inputs`, in the order of its arguments, and the results that it returns."""

    work: Program | Product
    inputs: list[TokenRows]
    outputs: list[TokenRows]

    def __post_init__(self) -> None:
        self.__name__ = type(self.work).__name__.lower()
        self.__module__ = __name__

    @property
    def symbol(self) -> str:
        """What its rows are, tokens or kept tokens."""
        return self.outputs[0].symbol

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        raise NotImplementedError("a stage runs in a chain")


class TokenRows:
    """A tensor as rows of one token's elements, some bytes from each other, and back."""

    def __init__(self, about: Meta):
        self.dtype, self.dim = about.dtype, about.token_dim
        self.symbol = None if self.dim is None else about.shape[self.dim]
        self.shape = about.one_token
        self.elements = math.prod(self.shape)
        self.bytes = self.elements * self.dtype.itemsize
        self.leads = self.dim is not None and math.prod(self.shape[: self.dim]) == 1
        self.strides = dense_strides(self.shape)

    def rows_of(self, x: Tensor, count: int) -> tuple[Tensor, int]:
        """The elements of a token dense, and the bytes from one token to the next; 0 for a weight."""
        dim = self.dim
        if dim is None:
            return x.contiguous(), 0
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
