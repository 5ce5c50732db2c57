"""Shapes and dtypes of graph nodes as plain data.

The number of tokens is the size "T". The number of tokens whose logits are computed is the size "L".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

TOKENS, KEPT = "T", "L"


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of a tensor.

    Attributes:
        dtype: Dtype of the elements.
        shape: Sizes. One that varies is a string: TOKENS, KEPT or an expression of them.
        one_token: The shape for a step of one token whose logits are computed.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    one_token: tuple[int, ...]

    @staticmethod
    def of(dtype: torch.dtype, shape: tuple[int | str, ...]) -> Meta:
        """Return the Meta of a tensor whose varying sizes are 1 for one token."""
        return Meta(dtype, shape, tuple(size if isinstance(size, int) else 1 for size in shape))

    @property
    def static(self) -> bool:
        """Return whether no size varies."""
        return all(isinstance(size, int) for size in self.shape)

    @property
    def token_dim(self) -> int | None:
        """Return the dimension that counts tokens, or None if there is none or another size varies too."""
        varying = [i for i, size in enumerate(self.shape) if isinstance(size, str)]
        return varying[0] if len(varying) == 1 and self.shape[varying[0]] in (TOKENS, KEPT) else None

    @property
    def numel_per_token(self) -> int:
        """Return the number of elements for one token."""
        return math.prod(self.one_token)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes for one token."""
        return self.numel_per_token * self.dtype.itemsize


def meta(node: fx.Node) -> Meta | None:
    """Return the Meta of the tensor that `node` computes, or None if it computes something else."""
    about = node.meta.get("about")
    return about if isinstance(about, Meta) else None


def tensor_meta(node: fx.Node) -> Meta:
    """Return the Meta of the tensor that `node` computes; raise TypeError if it computes something else."""
    about = meta(node)
    if about is None:
        raise TypeError(f"{node.name}: expected a node that computes a tensor")
    return about


def size_of(node: fx.Node) -> str | None:
    """Return the size that `node` computes, such as "T", or None if it computes something else."""
    about = node.meta.get("about")
    return about if isinstance(about, str) else None


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def annotate(graph: fx.Graph, names: Mapping[str, str]) -> None:
    """Replace what the exporter noted on the nodes of `graph`, in place, by plain data.

    A node that computes a tensor gets its Meta. A node that computes a number gets its text.

    Args:
        graph: Graph of an exported program.
        names: TOKENS and KEPT, by the exporter's symbol for that size.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta = {}
        if isinstance(value, Tensor):
            shape = tuple(size if isinstance(size, int) else renamed(size, names) for size in value.shape)
            node.meta["about"] = Meta(value.dtype, shape, tuple(map(at_one, value.shape)))
        elif value is not None and not isinstance(value, tuple | list):
            node.meta["about"] = renamed(value, names)


def renamed(size: object, names: Mapping[str, str]) -> str:
    """Return the text of `size` with the symbols in it replaced by their `names`."""
    text = str(size)
    for symbol, name in names.items():
        text = re.sub(rf"\b{symbol}\b", name, text)
    return text


def at_one(size: int | torch.SymInt) -> int:
    """Return `size` with every symbol in it set to 1."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
