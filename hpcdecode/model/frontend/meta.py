"""Shapes and dtypes of graph nodes as plain data: the number of tokens is "T", of kept tokens "L"."""

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
    """Of a tensor. A size that varies is a string: TOKENS, KEPT or an expression of them."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    one_token: tuple[int, ...]  # the shape where there is one token, and one kept

    @staticmethod
    def of(dtype: torch.dtype, shape: tuple[int | str, ...]) -> Meta:
        return Meta(dtype, shape, tuple(size if isinstance(size, int) else 1 for size in shape))

    @property
    def static(self) -> bool:
        return all(isinstance(size, int) for size in self.shape)

    @property
    def token_dim(self) -> int | None:
        """The dimension that counts tokens; None where there is none, or where another varies too."""
        varying = [i for i, size in enumerate(self.shape) if isinstance(size, str)]
        return varying[0] if len(varying) == 1 and self.shape[varying[0]] in (TOKENS, KEPT) else None

    @property
    def numel_per_token(self) -> int:
        return math.prod(self.one_token)

    @property
    def bytes_per_token(self) -> int:
        return self.numel_per_token * self.dtype.itemsize


def meta(node: fx.Node) -> Meta | None:
    """What is known of the tensor that `node` computes; None where it computes something else."""
    about = node.meta.get("about")
    return about if isinstance(about, Meta) else None


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def size_of(node: fx.Node) -> str | None:
    """The size that `node` computes, such as "T"; None where it computes something else."""
    about = node.meta.get("about")
    return about if isinstance(about, str) else None


def annotate(graph: fx.Graph, names: Mapping[str, str]) -> None:
    """Put plain data in the place of the exporter's values; `names` maps its symbols to TOKENS and KEPT."""
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta = {}
        if isinstance(value, Tensor):
            shape = tuple(size if isinstance(size, int) else renamed(size, names) for size in value.shape)
            node.meta["about"] = Meta(value.dtype, shape, tuple(map(at_one, value.shape)))
        elif value is not None and not isinstance(value, tuple | list):
            node.meta["about"] = renamed(value, names)


def renamed(size: object, names: Mapping[str, str]) -> str:
    text = str(size)
    for symbol, name in names.items():
        text = re.sub(rf"\b{symbol}\b", name, text)
    return text


def at_one(size: int | torch.SymInt) -> int:
    """`size` where all that varies is 1."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1))) if hasattr(expression, "subs") else size
