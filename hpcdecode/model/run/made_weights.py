"""Weights of a model as its slices take them, for another model of the same checkpoint to take them, too.

A layer for multi-token prediction has the embeddings and the LM head of the model (DeepSeek-V3, arXiv:2412.19437,
section 2.2), which may be larger than the layer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower.recipe import MadeBefore, Recipe
from hpcdecode.model.run.bound_slice import BoundSlice
from hpcdecode.model.run.values import Values

_Made = tuple[str, torch.dtype, Recipe]  # key of the tensor, dtype that it is read as, and how the weight is made of it


class MadeWeights:
    """Weights that are made of one tensor of the checkpoint each."""

    def __init__(self) -> None:
        self._made: dict[_Made, Tensor | Stack] = {}

    def add(self, values: Values, nodes: Sequence[fx.Node], bound: BoundSlice) -> None:
        """Keep the weights of a slice.

        Args:
            values: Of the model.
            nodes: Weights that the slice's graph names.
            bound: The slice.
        """
        for recipe, weight in bound.made():
            if (key := _key(values, nodes, recipe)) is not None:
                self._made[key] = weight

    def reader(self, values: Values, nodes: Sequence[fx.Node]) -> MadeBefore:
        """Return what finds the weights that a slice of another model takes, as `add` takes it."""

        def find(recipe: Recipe) -> Tensor | Stack | None:
            key = _key(values, nodes, recipe)
            return None if key is None else self._made.get(key)

        return find


def _key(values: Values, nodes: Sequence[fx.Node], recipe: Recipe) -> _Made | None:
    """Return what a weight is made of and how; None if that is not one tensor."""
    if len(recipe.sources) != 1 or recipe.biases:
        return None
    node = nodes[recipe.sources[0]]
    stored = values.stored_as(node)
    return None if stored is None else (stored, tensor_meta(node).dtype, replace(recipe, sources=()))
