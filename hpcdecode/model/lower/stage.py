"""What chains are made of: fused kernels and GEMMs as targets of a graph's calls, and tensors as rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdecode._ops_cpu import AdapterProduct, AdapterSum, ExpertProduct, FusedKernel, Product
from hpcdecode.model.frontend.meta import Meta, dense_strides
from hpcdecode.model.frontend.rows import padded


@dataclass(eq=False)
class Stage:
    """A fused kernel or a GEMM, as the target of a call in a graph.

    Attributes:
        work: The native object.
        inputs: Tensors that it reads, in the order of its arguments.
        outputs: Tensors that it returns.
        whole: Whether all tokens of a call go through it at once. Others take a block of tokens at a time.
    """

    work: FusedKernel | Product | ExpertProduct | AdapterProduct | AdapterSum
    inputs: Sequence[TokenRows]
    outputs: Sequence[TokenRows]
    whole: bool = False

    def __post_init__(self) -> None:
        self.__name__ = type(self.work).__name__.lower()
        self.__module__ = __name__

    @property
    def symbol(self) -> str | None:
        """Return what its rows count: "T" for tokens, "L" for those whose logits are needed."""
        return self.outputs[0].symbol

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Raise NotImplementedError: only chains run stages."""
        raise NotImplementedError("a stage runs in a chain")


class TokenRows:
    """The layout of a tensor as rows, each of them the dense elements of one token.

    Attributes:
        dtype: Type of the tensor.
        dim: Dimension that counts tokens, or None for a weight.
        symbol: Name of that dimension's size, "T" or "L", or None for a weight.
        shape: Shape of the tensor for one token.
        elements: Elements of a row.
        bytes: Bytes of a row.
        leads: True if tokens are the first dimension but for some of size 1.
        strides: Strides of the tensor for one token.
    """

    def __init__(self, about: Meta):
        self.dtype, self.dim = about.dtype, about.token_dim
        self.symbol = None if self.dim is None else str(about.shape[self.dim])
        self.shape = about.one_token
        self.elements = math.prod(self.shape)
        self.bytes = self.elements * self.dtype.itemsize
        self.leads = self.dim is not None and math.prod(self.shape[: self.dim]) == 1
        self.strides = dense_strides(self.shape)

    def rows_of(self, x: Tensor, count: int) -> tuple[Tensor, int]:
        """Return the rows of a tensor, copied only if those of `x` are not dense.

        Args:
            x: A tensor of this layout, or a weight.
            count: Number of tokens.

        Returns:
            A tensor that begins with the first row, and the bytes from one row to the next (0 for a weight).
        """
        dim = self.dim
        if dim is None:
            return x.contiguous(), 0
        strides = x.stride()
        if self.leads and strides[dim + 1 :] == self.strides[dim + 1 :]:
            return x, strides[dim] * self.dtype.itemsize
        rows = (x if self.leads else x.movedim(dim, 0)).reshape(count, self.elements).contiguous()
        return rows, self.bytes

    def fresh(self, count: int) -> tuple[Tensor, int]:
        """Return flat memory for the rows of `count` tokens, and the bytes from one row to the next."""
        return torch.empty(padded(count) * self.elements, dtype=self.dtype), self.bytes

    def shaped(self, flat: Tensor, count: int) -> Tensor:
        """Return the tensor whose rows lie in `flat`, memory from `fresh`."""
        dim = self.dim
        if dim is None:
            raise TypeError("expected a tensor of tokens, got a weight")
        if self.leads:
            shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
            return flat.as_strided(shape, (*(count * n for n in self.strides[:dim]), *self.strides[dim:]))
        rest = [n for d, n in enumerate(self.shape) if d != dim]
        return flat[: count * self.elements].view(count, *rest).movedim(0, dim)
