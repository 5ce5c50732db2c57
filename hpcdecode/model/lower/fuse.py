"""Make a slice's graph few calls: what lies between its matrix products runs as token programs.

A node's stage is the number of calls that are no program on the way to it from the slice's inputs. All that is
element-wise and of one stage becomes one program, which runs token by token on values that stay in cache.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.meta import Meta, meta
from hpcdecode.model.lower.handlers import HANDLERS, VIEWS
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.lowering import MAX_STATIC, Lowering, Unlowerable
from hpcdecode.model.lower.stage import Stage, TokenRows

aten = torch.ops.aten


@dataclass
class Region:
    """Element-wise nodes of one stage, and what goes in and out. Mere views of inputs stay outside the program."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]  # rows of tokens first, then weights
    outputs: list[fx.Node]
    program: Stage | None = None


def fuse(graph: fx.Graph) -> fx.Graph:
    """A graph of the same values in which the element-wise nodes of `graph` are calls of token programs."""
    plain: set[fx.Node] = set()  # nodes found to have no steps
    while True:
        stages = find_stages(graph, plain)
        regions = find_regions(graph, stages, plain)
        refused = next((node for region in regions.values() if (node := lower(region)) is not None), None)
        if refused is None:
            return rebuild(graph, stages, regions, plain)
        plain.add(refused)


def is_elementwise(node: fx.Node, plain: set[fx.Node]) -> bool:
    if node.op != "call_function" or node.target not in HANDLERS or node in plain:
        return False
    if node.target is operator.getitem:
        return is_elementwise(node.args[0], plain)
    about = meta(node.args[0]) if meta(node) is None and isinstance(node.args[0], fx.Node) else meta(node)
    inputs = [about_input for n in node.all_input_nodes if (about_input := meta(n)) is not None]
    return about is not None and about.token_dim is not None and all(fits(m) for m in (about, *inputs))


def fits(about: Meta) -> bool:
    """Whether a program can hold such a tensor: rows of tokens, or a weight that is not large."""
    size = math.prod(about.one_token)
    if about.static:
        return about.dtype in TYPES and 0 < size <= MAX_STATIC
    return about.dtype in TYPES and about.token_dim is not None and size > 0


def is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is aten.sym_size.int


def find_stages(graph: fx.Graph, plain: set[fx.Node]) -> dict[fx.Node, int]:
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = (stages[n] + (n.op == "call_function" and not is_light(n, plain)) for n in node.all_input_nodes)
        stages[node] = max(before, default=0)
    return stages


def is_light(node: fx.Node, plain: set[fx.Node]) -> bool:
    return is_elementwise(node, plain) or is_size(node)


def find_regions(graph: fx.Graph, stages: dict[fx.Node, int], plain: set[fx.Node]) -> dict[tuple, Region]:
    """Regions by stage and by what their rows are, tokens or kept tokens."""
    found: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_elementwise(node, plain):
            found[stages[node], symbol(node)].append(node)
    return {key: region for key, nodes in found.items() if (region := make_region(nodes)).outputs}


def symbol(node: fx.Node) -> str:
    about = meta(node) or meta(node.args[0])
    return about.shape[about.token_dim]


def make_region(nodes: list[fx.Node]) -> Region:
    """The part of `nodes` that computes what others read."""
    inside, views = set(nodes), set()
    for node in nodes:  # in graph order
        if node.target in VIEWS or node.target is operator.getitem:
            source = node.args[0]
            if source not in inside or source in views:
                views.add(node)
    outputs = [n for n in nodes if n not in views and meta(n) is not None and any(u not in inside for u in n.users)]
    needed = set(outputs)
    for node in reversed(nodes):
        if node in needed:
            needed.update(n for n in node.all_input_nodes if n in inside)
    kept = [n for n in nodes if n in needed]
    inputs = dict.fromkeys(n for node in kept for n in node.all_input_nodes if n not in inside and meta(n) is not None)
    ordered = sorted(inputs, key=lambda n: meta(n).static)
    return Region(kept, ordered, outputs)


def lower(region: Region) -> fx.Node | None:
    """Make the region's program; returns the node that has no steps, if there is one."""
    lowering = Lowering()
    for i, node in enumerate(region.inputs):
        lowering.load(node, i)
    for node in region.nodes:
        try:
            lowering.values[node] = HANDLERS[node.target](lowering, node)
        except Unlowerable:
            return node
    for i, node in enumerate(region.outputs):
        lowering.store(node, len(region.inputs) + i)
    program = lowering.finish(isa(), len(region.inputs) + len(region.outputs))
    inputs, outputs = ([TokenRows(meta(n)) for n in nodes] for nodes in (region.inputs, region.outputs))
    region.program = Stage(program, inputs, outputs)
    return None


def rebuild(graph: fx.Graph, stages: dict[fx.Node, int], regions: dict[tuple, Region], plain: set[fx.Node]) -> fx.Graph:
    """The new graph, stage by stage: sizes and views, programs, then the other calls."""
    made = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    gone = {n for region in regions.values() for n in region.outputs}

    def copy(node: fx.Node) -> None:
        new[node] = made.node_copy(node, new.__getitem__)

    for node in graph.nodes:
        if node.op == "placeholder":
            copy(node)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for stage in range(max(stages.values()) + 1):
        here = [n for n in calls if stages[n] == stage]
        light = [n for n in here if is_light(n, plain)]
        for node in light:
            if node not in gone and all(n in new for n in node.all_input_nodes):
                copy(node)
        for key, region in regions.items():
            if key[0] == stage:
                call_program(made, region, new)
        for node in light:
            if node not in new and all(n in new for n in node.all_input_nodes):
                copy(node)
        for node in here:
            if not is_light(node, plain):
                copy(node)
    made.output(fx.map_arg(graph.output_node().args[0], new.__getitem__))
    for node in reversed(made.nodes):
        if node.op == "call_function" and not node.users:
            made.erase_node(node)
    return made


def call_program(graph: fx.Graph, region: Region, new: dict[fx.Node, fx.Node]) -> None:
    call = graph.call_function(region.program, tuple(new[n] for n in region.inputs))
    if len(region.outputs) == 1:
        new[region.outputs[0]] = call
        return
    for i, node in enumerate(region.outputs):
        new[node] = graph.call_function(operator.getitem, (call, i))
