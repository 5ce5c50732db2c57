"""Typed access to graph nodes: torch.fx types each argument as a union of all that an argument may be."""

from __future__ import annotations

from torch import Tensor, fx
from torch.fx.node import Argument


def as_node(argument: Argument) -> fx.Node:
    """Return an argument that is a node. Raise TypeError if it is anything else."""
    if not isinstance(argument, fx.Node):
        raise TypeError(f"expected a node, got {argument!r:.100}")
    return argument


def as_nodes(argument: Argument) -> list[fx.Node]:
    """Return an argument that is a list or tuple of nodes. Raise TypeError if it is anything else."""
    if not isinstance(argument, list | tuple):
        raise TypeError(f"expected nodes, got {argument!r:.100}")
    return [as_node(each) for each in argument]


def as_int(argument: Argument) -> int:
    """Return an argument that is an integer. Raise TypeError if it is anything else."""
    if not isinstance(argument, int):
        raise TypeError(f"expected an integer, got {argument!r:.100}")
    return argument


def as_float(argument: Argument) -> float:
    """Return an argument that is a number. Raise TypeError if it is anything else."""
    if not isinstance(argument, int | float):
        raise TypeError(f"expected a number, got {argument!r:.100}")
    return argument


def results(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that `graph` returns. Raise TypeError if it returns anything but nodes."""
    return as_nodes(graph.output_node().args[0])


def traced_value(node: fx.Node) -> object:
    """Return the value that the exporter noted for `node`, such as a fake tensor or a symbol; None if it noted none."""
    return node.meta.get("val")


def traced_tensor(node: fx.Node) -> Tensor:
    """Return the fake tensor that the exporter noted for `node`. Raise TypeError if it noted anything else."""
    value = traced_value(node)
    if not isinstance(value, Tensor):
        raise TypeError(f"{node.name}: expected a node that computes a tensor")
    return value
