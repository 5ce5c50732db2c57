"""Make a slice's graph few calls: what lies between its GEMMs runs as fused element-wise kernels.

A node's level is the number of calls that no kernel can take on the way to it from the slice's inputs. All element-wise
nodes of one level become one kernel, which runs token by token on values that stay in cache.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.meta import Meta, meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.lower.handlers import FLAGS, HANDLERS, VIEWS
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.lowering import MAX_STATIC, Lowering, Unlowerable
from hpcdecode.model.lower.places import is_places
from hpcdecode.model.lower.stage import Stage, TokenRows

aten = torch.ops.aten


class RegionKey(NamedTuple):
    """What the nodes of a region have in common.

    Attributes:
        level: Number of calls before them that no kernel can take.
        symbol: What their rows count: "T" for tokens, "L" for those whose logits are needed.
    """

    level: int
    symbol: str


@dataclass(frozen=True)
class Region:
    """Element-wise nodes that become one kernel. Mere views of inputs stay outside.

    Attributes:
        nodes: The nodes, in the order of the graph.
        inputs: Nodes outside that they read: rows of tokens first, then weights.
        outputs: Those of the nodes that others read.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


class Kernel(NamedTuple):
    """A region of a level, and the stage that computes it."""

    level: int
    region: Region
    stage: Stage


class Refused(Exception):
    """A node that looked element-wise has no steps.

    Args:
        node: The node.
    """

    def __init__(self, node: fx.Node):
        super().__init__(node)
        self.node = node


def fuse(graph: fx.Graph) -> fx.Graph:
    """Return a graph of the same values in which calls of fused kernels replace the element-wise nodes."""
    plain: set[fx.Node] = set()  # nodes found to have no steps
    while True:
        levels = find_levels(graph, plain)
        regions = find_regions(graph, levels, plain)
        try:
            kernels = [Kernel(key.level, region, lower(region)) for key, region in regions.items()]
        except Refused as refused:
            plain.add(refused.node)
        else:
            return rebuild(graph, levels, kernels, plain)


def is_elementwise(node: fx.Node, plain: set[fx.Node]) -> bool:
    """Return True if a kernel may be able to compute the node.

    Args:
        node: A node of the graph.
        plain: Nodes that no kernel can compute.
    """
    if node.op != "call_function" or node.target not in HANDLERS or node in plain:
        return False
    if node.target is operator.getitem:
        return is_elementwise(as_node(node.args[0]), plain)
    about = meta(node.args[0]) if meta(node) is None and isinstance(node.args[0], fx.Node) else meta(node)
    inputs = [about_input for n in node.all_input_nodes if (about_input := meta(n)) is not None and not is_places(n)]
    if about is None or about.token_dim is None or (about.dtype == torch.bool and node.target not in FLAGS):
        return False
    return all(fits(m) for m in (about, *inputs))


def fits(about: Meta) -> bool:
    """Return True if a kernel can hold such a tensor: rows of tokens, or a weight that is not large."""
    size = math.prod(about.one_token)
    if about.static:
        return about.dtype in TYPES and 0 < size <= MAX_STATIC
    return (about.dtype in TYPES or about.dtype == torch.bool) and about.token_dim is not None and size > 0


def is_size(node: fx.Node) -> bool:
    """Return True if the node computes a size of a tensor."""
    return node.op == "call_function" and node.target is aten.sym_size.int


def is_light(node: fx.Node, plain: set[fx.Node]) -> bool:
    """Return True if the node does not count for levels: a kernel may compute it, or it is a size."""
    return is_elementwise(node, plain) or is_size(node)


def find_levels(graph: fx.Graph, plain: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the level of every node."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = (levels[n] + (n.op == "call_function" and not is_light(n, plain)) for n in node.all_input_nodes)
        levels[node] = max(before, default=0)
    return levels


def find_regions(graph: fx.Graph, levels: dict[fx.Node, int], plain: set[fx.Node]) -> dict[RegionKey, Region]:
    """Return the regions that compute anything that others read."""
    found: dict[RegionKey, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_elementwise(node, plain):
            found[RegionKey(levels[node], symbol(node))].append(node)
    return {key: region for key, nodes in found.items() if (region := make_region(nodes)).outputs}


def symbol(node: fx.Node) -> str:
    """Return the name of the size that counts the rows of an element-wise node."""
    about = meta(node) or tensor_meta(as_node(node.args[0]))
    assert about.token_dim is not None, "expected an element-wise node"
    return str(about.shape[about.token_dim])


def make_region(nodes: list[fx.Node]) -> Region:
    """Return the region of those of `nodes`, given in graph order, that compute what others read."""
    inside = set(nodes)
    views: set[fx.Node] = set()
    for node in nodes:
        if node.target in VIEWS or node.target is operator.getitem:
            viewed = as_node(node.args[0])
            if viewed not in inside or viewed in views:
                views.add(node)
    outputs = [n for n in nodes if n not in views and meta(n) is not None and any(u not in inside for u in n.users)]
    needed = set(outputs)
    for node in reversed(nodes):
        if node in needed:
            needed.update(n for n in node.all_input_nodes if n in inside)
    kept = [n for n in nodes if n in needed]
    inputs = dict.fromkeys(n for node in kept for n in node.all_input_nodes if n not in inside and meta(n) is not None)
    ordered = sorted(inputs, key=lambda n: tensor_meta(n).static)
    return Region(kept, ordered, outputs)


def lower(region: Region) -> Stage:
    """Return the stage that computes a region.

    Raises:
        Refused: If one of its nodes has no steps.
    """
    lowering = Lowering()
    for i, node in enumerate(region.inputs):
        lowering.load(node, i)
    for node in region.nodes:
        try:
            lowering.record(node, HANDLERS[node.target](lowering, node))
        except Unlowerable:
            raise Refused(node) from None
    for i, node in enumerate(region.outputs):
        lowering.store(node, len(region.inputs) + i)
    kernel = lowering.finish(isa(), len(region.inputs) + len(region.outputs))
    inputs, outputs = ([TokenRows(tensor_meta(n)) for n in nodes] for nodes in (region.inputs, region.outputs))
    return Stage(kernel, inputs, outputs)


def rebuild(graph: fx.Graph, levels: dict[fx.Node, int], kernels: list[Kernel], plain: set[fx.Node]) -> fx.Graph:
    """Return the new graph, level by level: sizes and views, kernels, then the other calls.

    Args:
        graph: The graph that is fused.
        levels: Levels of its nodes.
        kernels: What takes the place of element-wise nodes.
        plain: Nodes that no kernel can compute.
    """
    made = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    gone = {n for kernel in kernels for n in kernel.region.outputs}

    def copy(node: fx.Node) -> None:
        new[node] = made.node_copy(node, new.__getitem__)

    for node in graph.nodes:
        if node.op == "placeholder":
            copy(node)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for level in range(max(levels.values()) + 1):
        here = [n for n in calls if levels[n] == level]
        light = [n for n in here if is_light(n, plain)]
        for node in light:
            if node not in gone and all(n in new for n in node.all_input_nodes):
                copy(node)
        for kernel in kernels:
            if kernel.level == level:
                call_kernel(made, kernel, new)
        for node in light:
            if node not in new and all(n in new for n in node.all_input_nodes):
                copy(node)
        for node in sorted((n for n in here if not is_light(n, plain)), key=takes_all):
            copy(node)
    made.output(fx.map_arg(graph.output_node().args[0], new.__getitem__))
    for node in reversed(made.nodes):
        if node.op == "call_function" and not node.users:
            made.erase_node(node)
    return made


def takes_all(node: fx.Node) -> bool:
    """Return True if the node is a stage that all tokens go through at once: such ones follow on each other."""
    return isinstance(node.target, Stage) and node.target.whole


def call_kernel(graph: fx.Graph, kernel: Kernel, new: dict[fx.Node, fx.Node]) -> None:
    """Append the call of a kernel to `graph`, and let its results be `new` nodes of the region's outputs."""
    region = kernel.region
    call = graph.call_function(kernel.stage, tuple(new[n] for n in region.inputs))
    if len(region.outputs) == 1:
        new[region.outputs[0]] = call
        return
    for i, node in enumerate(region.outputs):
        new[node] = graph.call_function(operator.getitem, (call, i))
