"""From a slice's graph to what runs it, and to the weights in the form that it takes them."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.clean import VIEWS, remove_dead
from hpcdecode.model.frontend.elementwise import ROUNDING, steady
from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node, as_nodes, results
from hpcdecode.model.frontend.operators import SPLITS
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower.chain import chained
from hpcdecode.model.lower.complex_numbers import without_complex
from hpcdecode.model.lower.few_bits import NOTHING, Quantised
from hpcdecode.model.lower.fuse import fuse
from hpcdecode.model.lower.linears import merge_plainly, merge_projections
from hpcdecode.model.lower.norms import fuse_norms
from hpcdecode.model.lower.packed_weights import PRIVATE
from hpcdecode.model.lower.recipe import MadeBefore, ReadWeight, Recipe, make_weight
from hpcdecode.model.lower.stage import Stage
from hpcdecode.system.kept import directory
from hpcdecode.system.shared_memory import WeightMemory

aten = torch.ops.aten
T = TypeVar("T")
COLUMNS = (aten.slice.Tensor, aten.select.int, aten.transpose.int)


@dataclass(frozen=True)
class Compiled:
    """What runs the slices of one graph.

    Attributes:
        graph: The graph that runs.
        run: ([o,] context..., weights...) -> (q, k, v, context...) or (logits,).
        recipes: How its weights are made of those that the slice's graph named.
        by_torch: Whether torch's compiler compiles it.
    """

    graph: fx.Graph
    run: Callable[..., tuple[Tensor, ...]]
    recipes: Sequence[Recipe]
    by_torch: bool = False

    def weights(
        self,
        read: ReadWeight,
        memory: WeightMemory = PRIVATE,
        device: torch.device | None = None,
        made: MadeBefore = lambda recipe: None,
    ) -> tuple[Tensor | Stack, ...]:
        """Return the weights of one slice as `run` takes them.

        Args:
            read: Returns a weight that the slice's graph named, by number.
            memory: Where to put packed weights of CPUs.
            device: Device of the slice; None for the CPU.
            made: Returns the weight of a recipe on that device if it was made before.
        """
        on_cpu = device is None or device.type == "cpu"

        def weight_of(recipe: Recipe) -> Tensor | Stack:
            weight = made(recipe)
            if weight is None:
                weight = make_weight(recipe, read, memory if on_cpu else PRIVATE)
            return weight if on_cpu or isinstance(weight, Stack) else weight.to(device)

        return tuple(map(weight_of, self.recipes))


def compile_graph(
    graph: fx.Graph,
    device: torch.device,
    weights: Quantised = NOTHING,
    inductor: bool = False,
    *,
    ends: bool = True,
    rows: int = 0,
) -> Compiled:
    """Merge, pack and fuse the graph of a slice, or of a stretch of one, for the CPU; merge it for other devices.

    Args:
        graph: ([o,] context..., weights...) -> (q, k, v, context...) or (logits,).
        device: Device of the slice.
        weights: What the weights of projections are packed as.
        inductor: Let torch's compiler compile the merged graph instead.
        ends: Whether the slice ends with it.
        rows: Number of its first results that are to lie side by side.
    """
    if inductor:
        return compile_by_torch(graph, rows, weights if device.type != "cpu" else NOTHING, ends=ends)
    if device.type != "cpu":
        return compile_merged(graph, rows, weights, ends=ends)
    made = copied(graph)
    without_complex(made)
    recipes = merge_projections(made, weights, ends=ends)
    if rows > 1:
        join_rows(made, rows)
    if rows:
        copy_views(made, rows)
    copy_columns(made)
    fused = chained(fuse(made))
    for node in fused.nodes:
        if node.target in ROUNDING:
            node.target = steady(node.target)
    return runnable(fused, recipes)


def compile_merged(graph: fx.Graph, rows: int = 0, weights: Quantised = NOTHING, *, ends: bool = True) -> Compiled:
    """Return what runs a graph operator by operator, on any device, with as few of them as torch has.

    The projections of one input are one GEMM, and a norm is one operator.

    Args:
        graph: As `compile_graph` takes it.
        rows: Number of its first results that are to lie side by side.
        weights: What the weights of projections are packed as; int8 is left out.
        ends: Whether the slice ends with it.
    """
    made, recipes = _merged(graph, rows, weights, ends=ends)
    fuse_norms(made)
    return runnable(made, recipes)


def compile_by_torch(graph: fx.Graph, rows: int = 0, weights: Quantised = NOTHING, *, ends: bool = True) -> Compiled:
    """Return what runs a graph as `compile_merged` has it, with its element-wise work fused by torch's compiler.

    The first call compiles, and the second once more, for any number of tokens. The results are kept beside the
    traces.
    """
    merged = runnable(*_merged(graph, rows, weights, ends=ends))
    return replace(merged, run=compiled_by_torch(merged.run), by_torch=True)


def _merged(
    graph: fx.Graph, rows: int, weights: Quantised = NOTHING, *, ends: bool = True
) -> tuple[fx.Graph, Sequence[Recipe]]:
    """Return a graph with one GEMM for the projections of one input, and the recipes of its weights."""
    made = copied(graph)
    recipes = merge_plainly(made, weights, ends=ends)
    if rows > 1:
        join_rows(made, rows)
    for node in made.nodes:
        if node.target is aten.view.default:  # of columns of a merged projection, which may have to be copied
            node.target = aten.reshape.default
    remove_dead(made)
    return made, recipes


def compiled_by_torch(run: Callable[..., T]) -> Callable[..., T]:
    """Return a function as torch's compiler compiles it, whole."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory() / "inductor"))
    return torch.compile(run, fullgraph=True)


def runnable(graph: fx.Graph, recipes: Sequence[Recipe]) -> Compiled:
    """Return what runs `graph`, with weights made by `recipes`."""
    return Compiled(graph, fx.GraphModule({}, graph).forward, recipes)


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def copy_views(graph: fx.Graph, rows: int) -> None:
    """Let results that are views of columns of another tensor be tensors of their own.

    The next slice reads them row by row, so they are copied in any case: here by a kernel, as part of a chain.

    Args:
        graph: The graph of a slice.
        rows: Number of its first results, which stay as they are.
    """
    made, copies = results(graph), {}
    with graph.inserting_before(graph.output_node()):
        for node in dict.fromkeys(n for n in made[rows:] if is_part(n)):
            about = tensor_meta(node)
            copies[node] = graph.call_function(aten.clone.default, (node,))
            copies[node].meta["about"] = Meta.of(about.dtype, about.shape)
    graph.output_node().args = (tuple(copies.get(n, n) for n in made),)


def copy_columns(graph: fx.Graph) -> None:
    """Let GEMMs, and what joins tensors, read no columns of another tensor: a kernel copies these, as part of a chain.

    Where one kernel takes the columns and joins them, nothing is copied for it.
    """
    for node in list(graph.nodes):
        if isinstance(node.target, Stage):
            node.update_arg(0, _copied_columns(graph, node, as_node(node.args[0])))
        elif node.target is aten.cat.default:
            node.update_arg(0, [_copied_columns(graph, node, part) for part in as_nodes(node.args[0])])


def _copied_columns(graph: fx.Graph, reader: fx.Node, node: fx.Node) -> fx.Node:
    """Return a copy of a node that is a view of columns, made before its reader, or else the node."""
    if not is_part(node):
        return node
    about = tensor_meta(node)
    with graph.inserting_before(reader):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta["about"] = Meta.of(about.dtype, about.shape)
    return copy


def is_part(node: fx.Node) -> bool:
    """Return whether a node is a view of some columns of another."""
    if node.target is operator.getitem:
        return as_node(node.args[0]).target in SPLITS
    return node.target in COLUMNS or (node.target in VIEWS and is_part(as_node(node.args[0])))


def join_rows(graph: fx.Graph, rows: int) -> None:
    """Let the first `rows` of a slice's results, such as q, k and v, lie side by side in one matrix."""
    parts, others = results(graph)[:rows], results(graph)[rows:]
    about = tensor_meta(parts[0])
    widths = [tensor_meta(n).one_token[1] for n in parts]
    with graph.inserting_before(graph.output_node()):
        own = [n for n, width in zip(parts, widths, strict=True) if width]
        matrix = graph.call_function(aten.cat.default, (own, 1))
        matrix.meta["about"] = Meta.of(about.dtype, (about.shape[0], sum(widths)))
        starts = [sum(widths[:i]) for i in range(rows)]
        columns = [
            graph.call_function(aten.narrow.default, (matrix, 1, start, width))
            for start, width in zip(starts, widths, strict=True)
        ]
    graph.output_node().args = ((*columns, *others),)
