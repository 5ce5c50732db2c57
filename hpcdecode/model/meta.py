"""Shapes and dtypes of graph nodes as plain data: the number of tokens is "T", of kept tokens "L"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

TOKENS, KEPT = "T", "L"


@dataclass(frozen=True)
class Meta:
    dtype: torch.dtype
    shape: tuple[int | str, ...]  # a string where the size varies: TOKENS, KEPT or an expression of them

    @property
    def token_dim(self) -> int | None:
        """The dimension that counts tokens; None where there is none, or another varies too."""
        varying = [i for i, size in enumerate(self.shape) if isinstance(size, str)]
        return varying[0] if len(varying) == 1 and self.shape[varying[0]] in (TOKENS, KEPT) else None

    @property
    def static(self) -> bool:
        return all(isinstance(size, int) for size in self.shape)

    @property
    def one_token(self) -> tuple[int, ...]:
        """The shape where there is one token."""
        return tuple(1 if isinstance(size, str) else size for size in self.shape)


def meta_of(value: object, names: dict[str, str]) -> Meta | None:
    """The Meta of an exported node's value; `names` gives "T" and "L" for the trace's symbols. None for no tensor."""
    if not isinstance(value, Tensor):
        return None
    return Meta(value.dtype, tuple(s if isinstance(s, int) else names.get(str(s), str(s)) for s in value.shape))


def meta(node: fx.Node) -> Meta | None:
    return node.meta.get("tensor")
