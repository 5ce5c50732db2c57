"""Put copies of a traced layer where layers like it are to run, each with its own weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from hpcdecode.model.frontend.clean import freeze, is_assertion
from hpcdecode.model.frontend.kinds import Unlike


def expand(graph: fx.Graph, weights: Mapping[fx.Node, str], layers: str) -> None:
    """Replace the markers of `kinds.Kinds` in `graph`, in place, by the layers that they stand for.

    Args:
        graph: of a model that was traced with layers standing in for each other.
        weights: by placeholder the tensor of the model that it holds; those of the layers that were not traced, too.
        layers: name of the list of layers.

    Raises:
        Unlike: if a layer reads or gives anything but its inputs, its own weights, sizes and its output.
    """
    named = {name: node for node, name in weights.items()}
    markers = torch.ops.hpcdecode
    traced: dict[int, Layer] = {}
    for node in list(graph.nodes):  # in order: what a layer takes is final when it is met
        if node.target is markers.leave.default:
            place, like = node.args[3:]
            if place in traced:
                raise Unlike(f"layer {place} runs twice")
            traced[place] = Layer(node, weights, f"{layers}.{place}.")
            if traced[place].structure() != traced[like].structure():
                raise Unlike(f"layers {like} and {place} came out different")
        elif node.target is markers.again.default:
            inputs, place, like, _ = node.args
            with graph.inserting_before(node):
                out = traced[like].copied(graph, inputs, named, f"{layers}.{place}.")
            node.replace_all_uses_with(out)
            graph.erase_node(node)
    for layer in traced.values():
        layer.leave.replace_all_uses_with(layer.out)
        graph.erase_node(layer.leave)
        graph.erase_node(layer.enter)


class Layer:
    """A layer that was traced: the nodes between its inputs and its output."""

    def __init__(self, leave: fx.Node, weights: Mapping[fx.Node, str], prefix: str):
        """Raises Unlike."""
        self.leave, self.prefix = leave, prefix
        self.out, after, self.enter, *_ = leave.args
        self.inputs: list[fx.Node] = list(self.enter.args[0])
        if self.inputs != list(after):
            raise Unlike("a layer changes its inputs in place")
        self.weights: dict[fx.Node, str] = {}  # what follows the prefix in their names
        self.nodes = self._collect(weights)
        self._check_users()

    def _collect(self, weights: Mapping[fx.Node, str]) -> list[fx.Node]:
        """Return the nodes that the output needs, in their order, none before another that it takes."""
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
            else:
                raise Unlike(f"a layer reads {node.name} besides its inputs")
        if self.out not in found:
            raise Unlike("a layer returns what it is given")
        if sum(n.target is torch.ops.hpcdecode.attend.default for n in found) != 1:
            raise Unlike("a layer has not one attention")
        return [n for n in self.leave.graph.nodes if n in found]

    def _check_users(self) -> None:
        inside = {*self.nodes, self.leave}
        for node in self.nodes:
            if any(u not in inside and not is_size(u) and not is_assertion(u) for u in node.users):
                raise Unlike("a layer gives more than its output")
        if any(u not in inside and not is_assertion(u) for node in self.weights for u in node.users):
            raise Unlike("a layer's weights are read outside of it")

    def structure(self) -> list[tuple]:
        """Return what layers of one kind have in common: calls, and forms of their results."""
        places: dict[fx.Node, tuple] = {node: ("weight", name) for node, name in self.weights.items()}
        places.update((node, ("input", i)) for i, node in enumerate(self.inputs))
        places.update((node, ("node", i)) for i, node in enumerate(self.nodes))

        def place(node: fx.Node) -> tuple:
            return ("size", str(node.meta["val"])) if is_size(node) else places[node]

        forms = [(str(n.target), freeze(n.args, place), freeze(n.kwargs, place), described(n)) for n in self.nodes]
        return [*forms, place(self.out), sorted((name, described(node)) for node, name in self.weights.items())]

    def copied(self, graph: fx.Graph, inputs: list[fx.Node], named: Mapping[str, fx.Node], prefix: str) -> fx.Node:
        """Insert a copy that takes `inputs` and the weights under `prefix`; returns its output."""
        new: dict[fx.Node, fx.Node] = {}
        for mine, given in zip(self.inputs, inputs, strict=True):
            if new.setdefault(mine, given) is not given:
                raise Unlike("a layer is given one tensor twice, another two")
        for node, name in self.weights.items():
            if prefix + name not in named:
                raise Unlike(f"{prefix}{name} was not traced")
            new[node] = named[prefix + name]
            if described(new[node]) != described(node):
                raise Unlike(f"{prefix}{name} has another form")
        for node in self.nodes:
            new[node] = graph.node_copy(node, lambda n: n if is_size(n) else new[n])
        return new[self.out]


def is_size(node: fx.Node) -> bool:
    """Return whether `node` is a size, the same wherever it is read."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def described(node: fx.Node) -> str:
    """Return the form of the tensor or tensors that `node` computes."""
    values, _ = tree_flatten(node.meta.get("val"))
    return str([(tuple(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values])
