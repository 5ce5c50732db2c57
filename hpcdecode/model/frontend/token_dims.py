"""Give the tokens of every tensor a dimension of their own, and let every GEMM have them in its rows.

Some models normalise heads as rows of their own, [T * heads, dim], or multiply with the tokens in columns, weight @ x,
or by other operators than projections are. Then a result would depend on how many tokens there are: in its last bits,
as libraries cut such work up by size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch.fx.node import Argument, Target

from hpcdecode.model.frontend.clean import VIEWS, remove_dead
from hpcdecode.model.frontend.meta import TOKENS, Meta, meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node
from hpcdecode.model.frontend.operators import UNCHANGED, is_pointwise

aten = torch.ops.aten
PRODUCTS: frozenset[Target] = frozenset({aten.matmul.default, aten.mm.default, aten.bmm.default})
ALONG_LAST: frozenset[Target] = frozenset({aten.mean.dim, aten.sum.dim_IntList})


def separate_tokens(graph: fx.Graph) -> None:
    """Rewrite `graph` in place, without changing what it computes but for rounding."""
    for node in list(graph.nodes):
        if node.target is aten.matmul.default:
            turn(node)
        if node.target in PRODUCTS:
            project(node)
    for node, count in merged(graph).items():
        part(node, count)
    remove_dead(graph)


def project(product: fx.Node) -> None:
    """Let x [..., T, in] @ weight [in, out], or x [n, T, in] @ weight [n, in, out], be one or n projections."""
    x, weight = (as_node(each) for each in product.args)
    of_x, about = meta(x), meta(weight)
    if about is None or of_x is None or not about.static or of_x.token_dim in (None, len(of_x.shape) - 1):
        return
    graph, result = product.graph, tensor_meta(product)
    with graph.inserting_before(product):
        if len(about.shape) == 2:
            linear = _call(graph, aten.linear.default, (x, _turned(weight, about)), of_x, result.shape)
        elif len(about.shape) == len(of_x.shape) == 3 and of_x.token_dim == 1:
            turned, parts = _turned(weight, about), []
            for i in range(int(about.shape[0])):
                rows = _call(graph, aten.select.int, (x, 0, i), of_x, of_x.shape[1:])
                own = _call(graph, aten.select.int, (turned, 0, i), about, tensor_meta(turned).shape[1:])
                parts.append(_call(graph, aten.linear.default, (rows, own), of_x, result.shape[1:]))
            linear = _call(graph, aten.stack.default, (parts,), of_x, result.shape)
        else:
            return
    product.replace_all_uses_with(linear)


def _turned(weight: fx.Node, about: Meta) -> fx.Node:
    """Return a weight with its last two dimensions in the other order; what it is a view of, if that is such."""
    dims = len(about.shape)
    if weight.target is aten.permute.default and weight.args[1] == [*range(dims - 2), dims - 1, dims - 2]:
        return as_node(weight.args[0])
    if weight.target is aten.transpose.int and {as_int(d) % dims for d in weight.args[1:]} == {dims - 2, dims - 1}:
        return as_node(weight.args[0])
    shape = (*about.shape[:-2], about.shape[-1], about.shape[-2])
    return _call(weight.graph, aten.transpose.int, (weight, dims - 2, dims - 1), about, shape)


def turn(product: fx.Node) -> None:
    """Let `product`, weight [out, in] @ x [1, in, T], be a projection of x with the tokens in rows."""
    weight, x = (as_node(each) for each in product.args)
    about, of_x = meta(weight), meta(x)
    if about is None or of_x is None or not about.static or len(about.shape) != 2:
        return
    if len(of_x.shape) != 3 or of_x.token_dim != 2:
        return
    with product.graph.inserting_before(product):
        rows = _call(product.graph, aten.transpose.int, (x, 1, 2), of_x, (1, TOKENS, about.shape[1]))
        linear = _call(product.graph, aten.linear.default, (rows, weight), of_x, (1, TOKENS, about.shape[0]))
        turned = _call(product.graph, aten.transpose.int, (linear, 1, 2), of_x, (1, about.shape[0], TOKENS))
    product.replace_all_uses_with(turned)


def _call(
    graph: fx.Graph, target: Target, args: tuple[Argument, ...], like: Meta, shape: tuple[int | str, ...]
) -> fx.Node:
    node = graph.create_node("call_function", target, args)
    node.meta = {"about": Meta.of(like.dtype, shape)}
    return node


def merged(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the tensors whose first dimension counts tokens times heads, and their heads.

    Those that are used in another way than element by element or along their last dimension are left out, and those
    that come of them or that they come of.
    """
    heads = {node: count for node in graph.nodes if (count := _heads_of(node)) is not None}
    kept = set(heads)
    rejected = [node for node in heads if not _keeps_rows(node, heads)]
    while rejected:
        node = rejected.pop()
        if node in kept:
            kept.remove(node)
            rejected += [n for n in (*node.all_input_nodes, *node.users) if n in kept and not _apart(node, n)]
    return {node: count for node, count in heads.items() if node in kept}


def _apart(one: fx.Node, other: fx.Node) -> bool:
    """Return whether a view parts two tensors, so that the one may be rewritten without the other."""
    later = other if one in other.all_input_nodes else one
    return later.target in VIEWS


def _heads_of(node: fx.Node) -> int | None:
    """Return how many rows a token has, if the first dimension of a tensor counts tokens times that."""
    about = meta(node)
    if about is None or not about.shape:
        return None
    first, heads = about.shape[0], about.one_token[0]
    return heads if isinstance(first, str) and first in (f"{heads}*{TOKENS}", f"{TOKENS}*{heads}") else None


def _keeps_rows(node: fx.Node, heads: Mapping[fx.Node, int]) -> bool:
    """Return whether each row of a result depends on that row of its inputs alone, and what reads it knows no rows."""
    if any(user not in heads and user.target not in VIEWS for user in node.users):
        return False
    if node.target in VIEWS:
        return True
    if node.target in ALONG_LAST:
        rank = len(tensor_meta(as_node(node.args[0])).shape)
        dims = node.args[1]
        return isinstance(dims, list | tuple) and list(dims) in ([-1], [rank - 1]) and bool(node.args[2:])
    inputs = [n for n in node.all_input_nodes if n not in heads]
    if any((about := meta(n)) is None or not about.static or len(about.shape) > 1 for n in inputs):
        return False
    return node.target in UNCHANGED or is_pointwise(node)


def part(node: fx.Node, heads: int) -> None:
    """Let the first dimension of `node` be two: tokens, and heads."""
    about = tensor_meta(node)
    if node.target in VIEWS:
        node.update_arg(1, [-1, heads, *about.one_token[1:]])
    elif node.target in ALONG_LAST:
        node.update_arg(1, [-1])
    node.meta["about"] = Meta(about.dtype, (TOKENS, heads, *about.shape[1:]), (1, heads, *about.one_token[1:]))
