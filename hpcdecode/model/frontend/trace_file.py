"""The stored form of a trace: msgpack data without code.

Nodes are named by their place in the graph. Only operators of NAMESPACES and FUNCTIONS can be named.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.config import ModelFacts
from hpcdecode.model.frontend.meta import Meta, meta, size_of
from hpcdecode.model.frontend.mixers import mixers
from hpcdecode.model.frontend.trace import Trace

NAMESPACES = ("aten", "hpcdecode")
FUNCTIONS = ("getitem", "add", "sub", "mul", "floordiv")  # of the module operator
# A scalar as it is, or [kind, value].
Encoded: TypeAlias = "bool | int | float | str | list[Encoded] | dict[str, Encoded] | None"


class Unstorable(Exception):
    """A trace holds something that the format does not have, or a stored one makes no sense."""


class StoredMeta(NamedTuple):
    """A Meta."""

    dtype: str
    shape: list[int | str]
    one_token: list[int]


class StoredConstant(msgspec.Struct, array_like=True):
    """A tensor with its values."""

    dtype: str
    shape: list[int]
    data: bytes


class StoredNode(msgspec.Struct, array_like=True):
    """A node of a graph.

    Attributes:
        name: Name of the node.
        target: `aten.add.Tensor` or `operator.getitem`; empty for an input.
        args: Result of `encode`; msgspec has no recursive types.
        kwargs: Result of `encode`.
        about: The Meta of a tensor, or a size.
    """

    name: str
    target: str
    args: Any
    kwargs: Any
    about: str | StoredMeta | None


class StoredEnds(NamedTuple):
    """Places of the inputs of a step, and of its result; -1 for what a trace does not take."""

    ids: int
    positions: int
    logits_indices: int
    logits: int
    hidden: int = -1


class StoredTrace(msgspec.Struct, array_like=True):
    """A trace, its nodes by their place.

    Attributes:
        nodes: Nodes of the graph, in order.
        ends: Inputs of a step, and its result.
        weights: Name in the transformers model, by place.
        constants: Values of the buffers that checkpoints leave out, by place.
        dtype: Dtype of the parameters.
        facts: Facts about the model.
    """

    nodes: list[StoredNode]
    ends: StoredEnds
    weights: dict[int, str]
    constants: dict[int, StoredConstant]
    dtype: str
    facts: ModelFacts


def stored(trace: Trace) -> StoredTrace:
    """Return the stored form of `trace`. Raise Unstorable if it has none, as that of a member of a group."""
    if trace.membership is not None:
        raise Unstorable
    nodes = [n for n in trace.graph.nodes if n.op != "output"]
    places = {node: i for i, node in enumerate(nodes)}
    ends = (trace.ids, trace.positions, trace.logits_indices, trace.logits, trace.hidden)
    return StoredTrace(
        [stored_node(node, places) for node in nodes],
        StoredEnds(*(-1 if n is None else places[n] for n in ends)),
        {places[n]: name for n, name in trace.weights.items()},
        {places[n]: stored_constant(t) for n, t in trace.constants.items()},
        torch_name(trace.dtype),
        trace.facts,
    )


def restored(data: StoredTrace) -> Trace:
    """Return the trace that was stored as `data`. Raise Unstorable if `data` makes no sense."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    try:
        for each in data.nodes:
            nodes.append(restored_node(graph, each, nodes))
        ends = data.ends
        logits = nodes[ends.logits]
        graph.output((logits,))
        return Trace(
            graph=graph,
            ids=nodes[ends.ids],
            positions=nodes[ends.positions],
            logits_indices=nodes[ends.logits_indices],
            weights={nodes[i]: name for i, name in data.weights.items()},
            constants={nodes[i]: restored_constant(t) for i, t in data.constants.items()},
            attends=mixers(nodes),
            logits=logits,
            dtype=getattr(torch, data.dtype),
            facts=data.facts,
            hidden=None if ends.hidden < 0 else nodes[ends.hidden],
        )
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Unstorable from error


def stored_node(node: fx.Node, places: Mapping[fx.Node, int]) -> StoredNode:
    """Return the stored form of `node`; places: of all nodes of its graph. Raise Unstorable if it has none."""
    args = encode(node.args, places) if node.op == "call_function" else None
    return StoredNode(node.name, target_name(node), args, encode(dict(node.kwargs), places), stored_about(node))


def restored_node(graph: fx.Graph, made: StoredNode, nodes: Sequence[fx.Node]) -> fx.Node:
    """Append to `graph` the node that was stored as `made`, and return it; nodes: those before it, by place."""
    if made.target:
        args, kwargs = decode(made.args, nodes), decode(made.kwargs, nodes)
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise Unstorable
        node = graph.create_node("call_function", target_of(made.target), tuple(args), kwargs, made.name)
    else:
        node = graph.placeholder(made.name)
    node.meta = {} if made.about is None else {"about": restored_about(made.about)}
    return node


def target_name(node: fx.Node) -> str:
    """Return `aten.add.Tensor` or `operator.getitem`, or "" for an input. Raise Unstorable for any other target."""
    if node.op == "placeholder":
        return ""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in NAMESPACES:
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    if name in FUNCTIONS and getattr(operator, name) is node.target:
        return f"operator.{name}"
    raise Unstorable


def target_of(name: str) -> Callable[..., Any]:
    """Return the target that `target_name` returned this name for. Raise Unstorable for any other name."""
    namespace, *path = name.split(".")
    found: Callable[..., Any]
    if namespace == "operator" and len(path) == 1 and path[0] in FUNCTIONS:
        found = getattr(operator, path[0])
        return found
    if namespace not in NAMESPACES or len(path) != 2:
        raise Unstorable
    found = getattr(getattr(getattr(torch.ops, namespace), path[0]), path[1])
    return found


def encode(argument: Argument, places: Mapping[fx.Node, int]) -> Encoded:
    """Return an argument as data: a scalar as it is, whatever else as [kind, value].

    Args:
        argument: Argument of a node.
        places: Places of all nodes of the graph.

    Raises:
        Unstorable: If the format has no such kind.
    """
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    if isinstance(argument, fx.Node):
        return ["node", places[argument]]
    if isinstance(argument, tuple | list):
        return ["list", [encode(a, places) for a in argument]]
    if isinstance(argument, dict):
        return ["dict", {k: encode(v, places) for k, v in argument.items()}]
    if isinstance(argument, torch.device):
        return ["device", str(argument)]
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return ["torch", torch_name(argument)]
    raise Unstorable


def decode(data: Encoded, nodes: Sequence[fx.Node]) -> Argument:
    """Return the argument that `encode` returned `data` for; nodes: those before it, by place.

    Raises Unstorable, or ValueError, IndexError or RuntimeError, if `data` makes no sense.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise Unstorable
        return data
    kind, value = data
    if kind == "node" and isinstance(value, int):
        return nodes[value]
    if kind == "list" and isinstance(value, list):
        return [decode(v, nodes) for v in value]
    if kind == "dict" and isinstance(value, dict):
        return {k: decode(v, nodes) for k, v in value.items()}
    if kind == "device" and isinstance(value, str):
        return torch.device(value)
    found = getattr(torch, value) if kind == "torch" and isinstance(value, str) else None
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise Unstorable
    return found


def torch_name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return the name of a constant of torch, such as bfloat16."""
    return str(value).removeprefix("torch.")


def stored_about(node: fx.Node) -> StoredMeta | str | None:
    """Return the stored form of the Meta or size that `node` computes, or None if it computes something else."""
    about = meta(node)
    if about is None:
        return size_of(node)
    return StoredMeta(torch_name(about.dtype), list(about.shape), list(about.one_token))


def restored_about(about: StoredMeta | str) -> Meta | str:
    """Return the Meta or size that was stored as `about`."""
    if isinstance(about, str):
        return about
    return Meta(getattr(torch, about.dtype), tuple(about.shape), tuple(about.one_token))


def stored_constant(tensor: Tensor) -> StoredConstant:
    """Return the stored form of `tensor`, which is on the CPU."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return StoredConstant(torch_name(tensor.dtype), list(tensor.shape), flat.numpy().tobytes())


def restored_constant(stored: StoredConstant) -> Tensor:
    """Return the tensor that was stored."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.data:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(bytearray(stored.data), dtype=dtype).view(stored.shape)
