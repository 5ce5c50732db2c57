"""What adapters (LoRA) add to projections: stages of packed weights, or a plain operator where there are none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from hpcdecode._ops_cpu import Product
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.adapters import lora_update
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.packed_weights import WORD, UpdateSize
from hpcdecode.model.lower.projections import AdapterUpdate, Projection
from hpcdecode.model.lower.recipe import Form, Recipe
from hpcdecode.model.lower.weight_graph import WeightGraph


def update_size(group: Sequence[Projection]) -> UpdateSize | None:
    """Return the size of what adapters add to projections that become one, or None if they add nothing."""
    updates = _updates(group)
    if not updates:
        return None
    b = tensor_meta(updates[0].b)
    parts = tuple((p.width, 0 if p.update is None else p.update.rank) for p in group)
    return UpdateSize(b.one_token[0], parts, tensor_meta(updates[0].adapters), b)


def low_rank(
    made: WeightGraph, group: Sequence[Projection], x: fx.Node, size: UpdateSize, form: Form
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Add the GEMM by A where the graph inserts, and return what a GEMM with an update takes: (adapters, A x, B).

    Args:
        made: The graph.
        group: Projections that become one.
        x: Their input.
        size: Of what adapters add to them.
        form: Of B.
    """
    updates, about = _updates(group), tensor_meta(x)
    of_a, of_b = size.packed(about.one_token[-1], about.dtype)
    a = made.input(Recipe(made.sources(u.a for u in updates), form="packed lora a", packed=of_a))
    b = made.input(Recipe(made.sources(u.b for u in updates), form=form, packed=of_b, parts=size.parts))
    low = made.call(size.low_stage(about), (updates[0].adapters, x, a), size.low(about))
    return updates[0].adapters, low, b


def updated(made: WeightGraph, y: fx.Node, p: Projection, *, packed: bool = True) -> fx.Node:
    """Return y with what adapters add to a projection, added where the graph inserts.

    Args:
        made: The graph.
        y: Result of the projection without it.
        p: The projection.
        packed: Whether stages of packed weights may do so, which run on CPUs alone.
    """
    size = update_size([p])
    if size is None or p.update is None:
        return y
    x, about = as_node(p.node.args[1]), tensor_meta(p.node)
    if packed and _offered(x, p):
        adapters, low, b = low_rank(made, [p], x, size, "packed lora b")
        return made.call(size.sum_stage(tensor_meta(x), about), (adapters, y, low, b), about)
    return made.call(lora_update, (y, x, p.update.adapters, p.update.a, p.update.b), about)


def _offered(x: fx.Node, p: Projection) -> bool:
    """Return whether there are GEMMs of the types of a projection, and its rows are words."""
    about, dtype = tensor_meta(x), tensor_meta(p.node).dtype
    if about.dtype is not dtype or dtype not in TYPES or about.one_token[-1] * dtype.itemsize % WORD.itemsize:
        return False
    return Product.offered(TYPES[dtype], TYPES[dtype], isa())


def _updates(group: Sequence[Projection]) -> list[AdapterUpdate]:
    return [p.update for p in group if p.update is not None]
