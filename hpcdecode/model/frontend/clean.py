"""Simplify an exported graph: remove operators without effect, and merge equal expressions."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from hpcdecode.model.frontend.nodes import as_int, as_node, as_nodes, traced_tensor, traced_value

aten = torch.ops.aten
VIEWS: frozenset[Target] = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
UNREPEATABLE = ("empty", "rand", "bernoulli", "dropout", "multinomial")  # in the names of operators


def clean(graph: fx.Graph) -> None:
    """Simplify `graph` in place without changing any value that it computes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and is_assertion(node):
            graph.erase_node(node)
    merge_equal(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and (same := unchanged_argument(node)) is not None:
            node.replace_all_uses_with(same)
    for node in list(graph.nodes):
        skip_inner_views(node)
        if node.target is aten.new_empty.default:
            join_filled(node)
    for node in list(graph.nodes):
        if node.target is aten.copy.default:
            copy_whole(node)
    merge_equal(graph)
    remove_dead(graph)


def is_assertion(node: fx.Node) -> bool:
    """Return whether `node` only checks something: a size, say, or a constraint on a symbol."""
    name = str(node.target)
    return not node.users and ("_assert" in name or "sym_constrain" in name)


def remove_dead(graph: fx.Graph) -> None:
    """Remove the calls of `graph` whose result nothing reads."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def unchanged_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that `node` returns unchanged, or None if there is none."""
    if node.target is aten.cat.default:  # a rotary embedding of the whole head is joined with an empty rest
        parts = [part for part in as_nodes(node.args[0]) if 0 not in traced_tensor(part).shape]
        return parts[0] if len(parts) == 1 and traced_tensor(parts[0]).dtype == traced_tensor(node).dtype else None
    if node.target is aten.slice_scatter.default and 0 in traced_tensor(as_node(node.args[1])).shape:
        return as_node(node.args[0])
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not isinstance(value := traced_value(x), Tensor):
        return None
    if node.target is aten.transpose.int and x.target is aten.transpose.int and set(node.args[1:]) == set(x.args[1:]):
        return as_node(x.args[0])
    out = traced_value(node)
    if not isinstance(out, Tensor) or out.dtype != value.dtype or not same_shape(out, value):
        return None
    return x if keeps_values(node) else None


def keeps_values(node: fx.Node) -> bool:
    """Return whether `node`, whose result has the shape and dtype of its first argument, also has its values."""
    if node.target in VIEWS or node.target in (aten.alias.default, aten.detach.default, aten.expand.default):
        return True
    if node.target in (aten.slice.Tensor, aten.lift_fresh_copy.default):
        return True
    if node.target is aten._to_copy.default:
        return set(node.kwargs) <= {"dtype", "device"}
    if node.target is aten.dropout.default:
        return node.args[2] is False
    return node.target is aten.mul.Tensor and isinstance(node.args[1], float | int) and node.args[1] == 1


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Return whether two fake tensors have the same shape; sizes that vary are compared by their text."""
    return len(a.shape) == len(b.shape) and all(str(x) == str(y) for x, y in zip(a.shape, b.shape, strict=True))


def skip_inner_views(node: fx.Node) -> None:
    """Let a view of a view be a view of the first tensor, in place, as long as that one is contiguous."""
    while node.target in VIEWS:
        inner = as_node(node.args[0])
        if inner.target not in VIEWS or not is_contiguous(viewed := as_node(inner.args[0])):
            return
        node.update_arg(0, viewed)


def join_filled(buffer: fx.Node) -> None:
    """Let memory that is filled slice after slice along a dimension be the concatenation of the slices, in place."""
    parts: list[fx.Node] = []
    filled, end, dim = buffer, 0, -1
    while not parts or end < traced_tensor(buffer).shape[dim]:
        scatters = [u for u in filled.users if u.target is aten.slice_scatter.default and u.args[0] is filled]
        if len(scatters) != 1 or any(u.target is not aten.slice.Tensor for u in filled.users if u not in scatters):
            return
        filled, part = scatters[0], as_node(scatters[0].args[1])
        if part.target is aten.copy.default and same_form(part, as_node(part.args[1])):
            part = as_node(part.args[1])
        if (parts and filled.args[2] != dim) or filled.args[3] != end or len(filled.args) != 5:
            return
        dim = as_int(filled.args[2])
        parts.append(part)
        end += int(traced_tensor(part).shape[dim])
    with buffer.graph.inserting_before(filled):
        joined = buffer.graph.call_function(aten.cat.default, (parts, dim))
    joined.meta = dict(filled.meta)
    filled.replace_all_uses_with(joined)


def copy_whole(node: fx.Node) -> None:
    """Let a copy into memory of the same form be one into memory of its own, in place."""
    source = as_node(node.args[1])
    if not same_form(node, source):
        return
    with node.graph.inserting_before(node):
        own = node.graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
    own.meta = dict(node.meta)
    node.replace_all_uses_with(own)


def same_form(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes compute tensors of one shape and dtype."""
    one, other = traced_tensor(a), traced_tensor(b)
    return one.dtype == other.dtype and same_shape(one, other)


def is_contiguous(node: fx.Node) -> bool:
    """Return whether `node` computes a contiguous tensor."""
    value = traced_value(node)
    return isinstance(value, Tensor) and value.is_contiguous()


def merge_equal(graph: fx.Graph) -> None:
    """Let equal calls in `graph` be one call, in place.

    The graph has no in-place operators, so equal calls give equal values.
    """
    first_of: dict[tuple[Target, Hashable, Hashable], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or any(word in str(node.target) for word in UNREPEATABLE):
            continue
        first = first_of.setdefault((node.target, freeze(node.args), freeze(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def freeze(argument: Argument, name: Callable[[fx.Node], Hashable] = lambda node: node) -> Hashable:
    """Return a hashable form of a node's argument in which 1, 1.0 and True differ.

    Args:
        argument: Argument of a node, or all of its args or kwargs.
        name: Function that gives the form of a node.
    """
    if isinstance(argument, fx.Node):
        return name(argument)
    if isinstance(argument, dict):
        return tuple((key, freeze(value, name)) for key, value in sorted(argument.items()))
    if isinstance(argument, tuple | list):
        return tuple(freeze(value, name) for value in argument)
    return type(argument).__name__, str(argument)
