"""Let products of complex numbers be products of pairs of real ones, which fused element-wise kernels take.

Rotary embeddings of some models multiply complex numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.clean import remove_dead
from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node
from hpcdecode.model.lower.instruction import Value
from hpcdecode.model.lower.lowering import Lowering, fresh

aten = torch.ops.aten


def without_complex(graph: fx.Graph) -> None:
    """Replace products of complex64 numbers in `graph`, in place. Other operators on such numbers stay."""
    made: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.view_as_real.default and _is_product(as_node(node.args[0])):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_pairs(graph, as_node(node.args[0]), made))
    remove_dead(graph)


def product_of_pairs(x: Tensor, y: Tensor) -> Tensor:
    """Return the products of complex numbers, float32 [..., 2], of two tensors of such pairs."""
    return torch.view_as_real(torch.view_as_complex(x.contiguous()) * torch.view_as_complex(y.contiguous()))


def pairs_product(low: Lowering, node: fx.Node) -> Value:
    """Handle product_of_pairs(x, y)."""
    shape = tensor_meta(node).one_token
    last, part = len(shape) - 1, (*shape[:-1], 1)
    a, b, c, d = (low.packed(low.operand(n).part(_last(n), at, 1)) for n in node.args for at in (0, 1))

    def times(one: Value, other: Value) -> Value:
        return low.step(Op.mul, part, one, other)

    out = fresh(shape)
    low.emit(Op.copy, out.part(last, 0, 1), low.step(Op.sub, part, times(a, c), times(b, d)))
    low.emit(Op.copy, out.part(last, 1, 1), low.step(Op.add, part, times(a, d), times(b, c)))
    return out


def _last(argument: Argument) -> int:
    return len(tensor_meta(as_node(argument)).shape) - 1


def _is_product(node: fx.Node) -> bool:
    """Return whether a node multiplies two tensors of complex64 numbers."""
    factors = node.args if node.target is aten.mul.Tensor else ()
    return len(factors) == 2 and all(isinstance(n, fx.Node) and _is_complex(n) for n in factors)


def _is_complex(node: fx.Node) -> bool:
    return tensor_meta(node).dtype == torch.complex64


def _pairs(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node of the same numbers as float32 [..., 2]; it is made, where the graph inserts, once."""
    shape = tensor_meta(node).shape

    def call(target: Target, *args: Argument) -> fx.Node:
        made[node] = graph.call_function(target, args)  # type: ignore[arg-type]
        made[node].meta["about"] = Meta.of(torch.float32, (*shape, 2))
        return made[node]

    if node in made:
        return made[node]
    if _is_product(node):
        return call(product_of_pairs, *(_pairs(graph, as_node(n), made) for n in node.args))
    if node.target is aten.unsqueeze.default:
        return call(node.target, _pairs(graph, as_node(node.args[0]), made), as_int(node.args[1]) % len(shape))
    if node.target is aten.view_as_complex.default:
        return as_node(node.args[0])
    return call(aten.view_as_real.default, node)
