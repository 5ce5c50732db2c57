"""Tidy an exported graph: no-ops and assertions go, equal expressions become one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
UNREPEATABLE = ("empty", "rand", "bernoulli", "dropout", "multinomial")


def clean(graph: fx.Graph) -> None:
    """Simplify `graph` in place without changing any value it computes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and is_assertion(node):
            graph.erase_node(node)
    merge_equal(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and (same := simpler(node)) is not None:
            node.replace_all_uses_with(same)
    for node in graph.nodes:
        skip_inner_views(node)
    merge_equal(graph)
    remove_dead(graph)


def is_assertion(node: fx.Node) -> bool:
    name = str(node.target)
    return not node.users and ("_assert" in name or "sym_constrain" in name)


def remove_dead(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def simpler(node: fx.Node) -> fx.Node | None:
    """The argument that `node` returns unchanged, if it does."""
    if node.target is aten.cat.default:  # partial rotary embeddings of the whole head leave an empty rest
        parts = [part for part in node.args[0] if 0 not in part.meta["val"].shape]
        return parts[0] if len(parts) == 1 and parts[0].meta["val"].dtype == node.meta["val"].dtype else None
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not isinstance(value := x.meta.get("val"), Tensor):
        return None
    if node.target is aten.transpose.int and x.target is aten.transpose.int and set(node.args[1:]) == set(x.args[1:]):
        return x.args[0]
    out = node.meta["val"]
    if not isinstance(out, Tensor) or out.dtype != value.dtype or not same_shape(out, value):
        return None
    if node.target in VIEWS or node.target in (aten.alias.default, aten.detach.default, aten.expand.default):
        return x
    if node.target in (aten.slice.Tensor, aten.lift_fresh_copy.default):
        return x
    if node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype", "device"}:
        return x
    if node.target is aten.dropout.default and node.args[2] is False:
        return x
    if node.target is aten.mul.Tensor and isinstance(node.args[1], float | int) and node.args[1] == 1:
        return x
    return None


def same_shape(a: Tensor, b: Tensor) -> bool:
    return len(a.shape) == len(b.shape) and all(str(x) == str(y) for x, y in zip(a.shape, b.shape, strict=True))


def skip_inner_views(node: fx.Node) -> None:
    """A view of a view is a view of the first tensor, as long as that one is contiguous."""
    while node.target in VIEWS and (inner := node.args[0]).target in VIEWS and is_contiguous(inner.args[0]):
        node.update_arg(0, inner.args[0])


def is_contiguous(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_contiguous()


def merge_equal(graph: fx.Graph) -> None:
    """Common subexpression elimination: without in-place operators, equal calls give equal values."""
    seen: dict = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or any(word in str(node.target) for word in UNREPEATABLE):
            continue
        first = seen.setdefault((node.target, freeze(node.args), freeze(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def freeze(arg, name: Callable = lambda node: node):
    """A hashable form of a node argument in which 1, 1.0 and True differ; nodes appear as `name` gives them."""
    if isinstance(arg, fx.Node):
        return name(arg)
    if isinstance(arg, dict):
        return tuple((key, freeze(value, name)) for key, value in sorted(arg.items()))
    if isinstance(arg, tuple | list):
        return tuple(freeze(value, name) for value in arg)
    return type(arg).__name__, str(arg)
