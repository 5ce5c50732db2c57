"""Put copies of a traced layer where layers like it run, each with its own weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from hpcdecode.model.frontend.clean import freeze, is_assertion
from hpcdecode.model.frontend.kinds import LayersDiffer
from hpcdecode.model.frontend.nodes import as_int, as_node, as_nodes, traced_value

PlaceInLayer = tuple[str, str | int]  # what a node is to its layer: ("weight", name), ("input", 0), ("node", 3) ...


class LeaveArguments(NamedTuple):
    """Arguments of the marker `leave`; `kinds.define` says what they are."""

    out: fx.Node
    inputs: list[fx.Node]
    enter: fx.Node
    layer: int
    like: int

    @classmethod
    def of(cls, node: fx.Node) -> LeaveArguments:
        """Return the arguments of the call `node`."""
        out, inputs, enter, layer, like = node.args
        return cls(as_node(out), as_nodes(inputs), as_node(enter), as_int(layer), as_int(like))


class AgainArguments(NamedTuple):
    """Arguments of the marker `again`; `kinds.define` says what they are."""

    inputs: list[fx.Node]
    layer: int
    like: int

    @classmethod
    def of(cls, node: fx.Node) -> AgainArguments:
        """Return the arguments of the call `node`."""
        inputs, layer, like, _ = node.args
        return cls(as_nodes(inputs), as_int(layer), as_int(like))


def expand(graph: fx.Graph, weights: Mapping[fx.Node, str], layers: str) -> None:
    """Replace the markers of `kinds.LayerKinds` in `graph`, in place, by the layers that they stand for.

    Args:
        graph: Graph of a model that was traced with layers standing in for each other.
        weights: Name of the tensor of the model that each placeholder holds, including layers that were not traced.
            Those that all layers may read are left out.
        layers: Name of the list of layers.

    Raises:
        LayersDiffer: If a layer reads anything but its inputs, its own weights and sizes, or gives more than its
            output.
    """
    named = {name: node for node, name in weights.items()}
    traced: dict[int, Layer] = {}
    for node in list(graph.nodes):  # in order, so that the inputs of a layer are final when it is reached
        if node.target is torch.ops.hpcdecode.leave.default:
            _, _, _, layer, like = LeaveArguments.of(node)
            if layer in traced:
                raise LayersDiffer(f"layer {layer} runs twice")
            traced[layer] = Layer(node, weights, f"{layers}.{layer}.")
            if traced[layer].structure() != traced[like].structure():
                raise LayersDiffer(f"layers {like} and {layer} came out different")
        elif node.target is torch.ops.hpcdecode.again.default:
            inputs, layer, like = AgainArguments.of(node)
            with graph.inserting_before(node):
                out = traced[like].copied(graph, inputs, named, f"{layers}.{layer}.")
            node.replace_all_uses_with(out)
            graph.erase_node(node)
    for made in traced.values():
        made.leave.replace_all_uses_with(made.out)
        graph.erase_node(made.leave)
        graph.erase_node(made.enter)


class Layer:
    """A layer that was traced: the nodes between its inputs and its output.

    Args:
        leave: The marker after it.
        weights: Name of the tensor of the model that each placeholder holds.
        prefix: Prefix of the names of its weights: the name of the layer, and a dot.

    Attributes:
        leave: The marker after it.
        enter: The marker before it.
        inputs: The tensors that it takes.
        out: Its output.
        weights: Name of each of its weights, without the prefix.
        shared: Inputs and buffers of the model that it reads besides, such as positions: the same for every layer.
        nodes: Its calls, in the graph's order.

    Raises:
        LayersDiffer: If a copy could not stand for another layer.
    """

    def __init__(self, leave: fx.Node, weights: Mapping[fx.Node, str], prefix: str):
        self.leave, self.prefix = leave, prefix
        self.out, after, self.enter, *_ = LeaveArguments.of(leave)
        self.inputs = as_nodes(self.enter.args[0])
        if self.inputs != after:
            raise LayersDiffer("a layer changes its inputs in place")
        self.weights: dict[fx.Node, str] = {}
        self.shared: set[fx.Node] = set()
        self.nodes = self._collect(weights)
        self._check_users()

    def _collect(self, weights: Mapping[fx.Node, str]) -> list[fx.Node]:
        """Return the nodes that the output needs, in the graph's order, and note the weights that they read."""
        found: set[fx.Node] = set()
        waiting = [self.out]
        while waiting:
            node = waiting.pop()
            if node in found or node in self.inputs or is_size(node):
                continue
            if node.op == "call_function":
                found.add(node)
                waiting += node.all_input_nodes
            elif weights.get(node, "").startswith(self.prefix):
                self.weights[node] = weights[node].removeprefix(self.prefix)
            elif node.op == "placeholder" and node not in weights:
                self.shared.add(node)
            else:
                raise LayersDiffer(f"a layer reads {node.name} besides its inputs")
        if self.out not in found:
            raise LayersDiffer("a layer returns what it is given")
        return [n for n in self.leave.graph.nodes if n in found]

    def _check_users(self) -> None:
        inside = {*self.nodes, self.leave}
        for node in self.nodes:
            if any(u not in inside and not is_size(u) and not is_assertion(u) for u in node.users):
                raise LayersDiffer("a layer gives more than its output")
        if any(u not in inside and not is_assertion(u) for node in self.weights for u in node.users):
            raise LayersDiffer("a layer's weights are read outside of it")

    def structure(self) -> list[object]:
        """Return what layers of one kind have in common: their calls, and the form of every result and weight."""
        places: dict[fx.Node, PlaceInLayer] = {node: ("weight", name) for node, name in self.weights.items()}
        places.update((node, ("shared", node.name)) for node in self.shared)
        places.update((node, ("input", i)) for i, node in enumerate(self.inputs))
        places.update((node, ("node", i)) for i, node in enumerate(self.nodes))

        def place(node: fx.Node) -> PlaceInLayer:
            return ("size", str(traced_value(node))) if is_size(node) else places[node]

        calls = [(str(n.target), freeze(n.args, place), freeze(n.kwargs, place), result_form(n)) for n in self.nodes]
        return [*calls, place(self.out), sorted((name, result_form(node)) for node, name in self.weights.items())]

    def copied(self, graph: fx.Graph, inputs: Sequence[fx.Node], named: Mapping[str, fx.Node], prefix: str) -> fx.Node:
        """Insert a copy of the layer into `graph`, and return the copy's output.

        Args:
            graph: Graph that the layer is in.
            inputs: Inputs of the copy.
            named: Placeholder of every weight of the model, by name.
            prefix: Prefix of the names of the copy's weights.

        Raises:
            LayersDiffer: If the inputs or weights are not of the form of the layer's own.
        """
        new: dict[fx.Node, fx.Node] = {}
        for own, given in zip(self.inputs, inputs, strict=True):
            if new.setdefault(own, given) is not given:
                raise LayersDiffer("a layer is given one tensor twice, another two")
        for node, name in self.weights.items():
            if prefix + name not in named:
                raise LayersDiffer(f"{prefix}{name} was not traced")
            new[node] = named[prefix + name]
            if result_form(new[node]) != result_form(node):
                raise LayersDiffer(f"{prefix}{name} has another form")
        for node in self.nodes:
            new[node] = graph.node_copy(node, lambda n: n if is_size(n) or n in self.shared else new[n])
        return new[self.out]


def is_size(node: fx.Node) -> bool:
    """Return whether `node` is a size, the same wherever it is read."""
    return isinstance(traced_value(node), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def result_form(node: fx.Node) -> str:
    """Return shape, strides and dtype of the tensor or tensors that `node` computes, as text."""
    values, _ = tree_flatten(traced_value(node))
    return str([(tuple(v.shape), v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in values])
