"""RMS norms as one operator of torch, which a GPU computes in one kernel: x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

import operator

import torch
from torch import fx

from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_float, as_node

aten = torch.ops.aten
CASTS = (aten._to_copy.default, aten.type_as.default)


def fuse_norms(graph: fx.Graph) -> None:
    """Replace each norm of a graph, in place, by one operator that rounds where the graph does.

    Where the graph widens bfloat16 to float32 for the norm and narrows the result at once, the operator does both.
    """
    for node in list(graph.nodes):
        if node.target is aten.mul.Tensor and (eps := _eps(node)) is not None:
            _replace(graph, node, as_node(node.args[0]), eps)
    graph.eliminate_dead_code()


def _eps(node: fx.Node) -> float | None:
    """Return eps if a node is x * rsqrt(mean(x * x, -1) + eps), else None."""
    x, root = node.args
    if not isinstance(x, fx.Node) or not isinstance(root, fx.Node) or root.target is not aten.rsqrt.default:
        return None
    shifted = as_node(root.args[0])
    mean = shifted.args[0] if shifted.target is aten.add.Tensor and not shifted.kwargs else None
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or mean.kwargs:
        return None
    square, dims, *keep = mean.args
    power = as_node(square)
    last = len(tensor_meta(x).shape) - 1
    over_last = dims in ([-1], [last]) and keep == [True]
    squared = power.target is aten.pow.Tensor_Scalar and power.args == (x, 2)
    return as_float(shifted.args[1]) if over_last and squared and isinstance(shifted.args[1], float) else None


def _replace(graph: fx.Graph, node: fx.Node, x: fx.Node, eps: float) -> None:
    """Let those that read a norm of `x` read one operator."""
    made = node
    (reader, *others) = node.users
    if x.target in CASTS and not others and reader.target in CASTS:
        narrow = as_node(x.args[0])
        if tensor_meta(narrow).dtype == tensor_meta(reader).dtype == torch.bfloat16:
            made, x = reader, narrow
    about = tensor_meta(made)
    if tensor_meta(x).dtype != about.dtype or not isinstance(about.shape[-1], int):
        return
    with graph.inserting_before(made):
        both = graph.call_function(aten._fused_rms_norm.default, (x, [about.shape[-1]], None, eps))
        norm = graph.call_function(operator.getitem, (both, 0))
    norm.meta["about"] = Meta(about.dtype, about.shape, about.one_token)
    made.replace_all_uses_with(norm)
