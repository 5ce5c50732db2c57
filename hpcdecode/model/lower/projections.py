"""Find the projections of a slice's graph, and the pairs of them whose results gate each other."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.adapters import lora_update
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_node

aten = torch.ops.aten


@dataclass(frozen=True)
class AdapterUpdate:
    """What adapters (LoRA) add to a projection.

    Attributes:
        adapters: Placeholder of the tokens' adapters.
        a: Placeholder of A of all adapters, [adapters, rank, in].
        b: Placeholder of B of all adapters, [adapters, out, rank].
    """

    adapters: fx.Node
    a: fx.Node
    b: fx.Node

    @property
    def rank(self) -> int:
        """Return the rank that all adapters have in memory."""
        return tensor_meta(self.a).one_token[1]


@dataclass(frozen=True)
class Projection:
    """x @ weight.T + bias, and what adapters add to it.

    Attributes:
        node: Node of the result [..., out].
        x: Node of the activations [..., in].
        weight: Placeholder of the weight [out, in], or of those [E, out, in] of experts.
        bias: Placeholder of the bias [out] or biases [E, out], or None.
        transposed: True if the weight is [in, out] instead, or [E, in, out].
        update: What adapters add, or None.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    update: AdapterUpdate | None = None

    @property
    def calls(self) -> list[fx.Node]:
        """Return the nodes that it is, each before its own arguments."""
        return [self.node] if self.update is None else [self.node, as_node(self.node.args[0])]

    @property
    def width(self) -> int:
        """Return the number of outputs."""
        return tensor_meta(self.node).one_token[-1]


@dataclass(frozen=True)
class Gate:
    """op(gate) * up, of two projections of one input, or of one whose first half is the gate.

    Attributes:
        op: Activation of the gate, or None for a projection without one.
        projections: The one or two projections.
        nodes: All nodes that it replaces, each before its own arguments. The first is the result.
    """

    op: Op | None
    projections: list[Projection]
    nodes: list[fx.Node]


def projection(node: fx.Node, weights: Collection[fx.Node]) -> Projection | None:
    """Return the projection that a node is, or None if it is none whose weight can be packed.

    Args:
        node: A node of the graph.
        weights: Placeholders of the slice's weights.
    """
    bias: object
    if node.target is aten.linear.default:
        x, weight, bias = (*node.args, None)[:3]
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
    else:
        return None
    if bias is not None and not (isinstance(bias, fx.Node) and bias in weights):
        return None
    found = Projection(node, as_node(x), as_node(weight), bias, transposed=node.target is aten.addmm.default)
    if (updated := updated_by(node, weights)) is not None:
        found = replace(found, node=updated, update=AdapterUpdate(*map(as_node, updated.args[2:])))
    alone = found.weight in weights and len(found.weight.users) == 1
    return found if alone else None


def updated_by(node: fx.Node, weights: Collection[fx.Node]) -> fx.Node | None:
    """Return the only node that reads a projection's result, if adapters update it there; else None."""
    readers = list(node.users)
    if len(readers) != 1 or readers[0].target is not lora_update or readers[0].args[0] is not node:
        return None
    return readers[0] if all(argument in weights for argument in readers[0].args[3:]) else None


def expert_projection(node: fx.Node, weights: Collection[fx.Node]) -> Projection | None:
    """Return the projection by experts that a node is, or None if it is none whose weights can be packed.

    Args:
        node: A node of the graph.
        weights: Placeholders of the slice's weights.
    """
    if node.target is not expert_linear:
        return None
    x, _, weight, bias, transposed = node.args[:5]
    if bias is not None and not (isinstance(bias, fx.Node) and bias in weights):
        return None
    found = Projection(node, as_node(x), as_node(weight), bias, transposed=bool(transposed))
    return found if found.weight in weights and len(found.weight.users) == 1 else None


def gate_of(node: fx.Node, projections: Mapping[fx.Node, Projection]) -> Gate | None:
    """Return the gate whose result a node is, or None.

    Args:
        node: A node of the graph.
        projections: Projections of the graph by their nodes.
    """
    if node.target is not aten.mul.Tensor or node.kwargs:
        return None
    for activated, up in (node.args, node.args[::-1]):
        if isinstance(activated, fx.Node) and isinstance(up, fx.Node):
            op = _activation(activated)
            gate = None if op is None else _gate(op, node, activated, up, projections)
            if gate is not None:
                return gate
    return None


def _gate(
    op: Op, result: fx.Node, activated: fx.Node, up: fx.Node, projections: Mapping[fx.Node, Projection]
) -> Gate | None:
    """Return the gate result = activated * up, or None if something else reads what it is made of."""
    gate = as_node(activated.args[0])
    halved = _halved(gate, up)
    sources = [gate, up] if halved is None else [as_node(halved.args[0])]
    made = [projections[n] for n in sources if n in projections]
    if len(made) < len(sources) or len({(p.x, p.width, p.transposed, p.bias is None) for p in made}) > 1:
        return None
    calls = [call for p in made for call in p.calls]
    inner = [activated, *([] if halved is None else [gate, up, halved]), *calls]
    if all(len(n.users) == (2 if n is halved else 1) for n in inner):
        return Gate(op, made, [result, *inner])
    return None


def _halved(one: fx.Node, other: fx.Node) -> fx.Node | None:
    """Return the split whose first half is `one` and whose second half is `other`, or None."""
    if one.target is not operator.getitem or other.target is not operator.getitem:
        return None
    (split, first), (same, second) = one.args, other.args
    if not isinstance(split, fx.Node) or split is not same or (first, second) != (0, 1):
        return None
    if split.target is not aten.split.Tensor or split.kwargs:
        return None
    x, size, dim = (*split.args, 0)[:3]
    shape = tensor_meta(as_node(x)).shape
    in_two = isinstance(size, int) and 2 * size == shape[-1]
    return split if dim in (-1, len(shape) - 1) and in_two else None


def _activation(node: fx.Node) -> Op | None:
    """Return the activation of a gate that a node computes, or None."""
    if node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        return Op.gelu_tanh
    return Op.silu if node.target is aten.silu.default else None
