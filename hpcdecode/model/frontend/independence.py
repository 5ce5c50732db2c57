"""Show that no operator outside of attention mixes tokens, so that a row does not depend on the rows beside it.

The traced graph is run in float64 on four tokens together, and on one of them alone. Attention, recurrences,
projections and embeddings are replaced by stand-ins that work on each token by itself, cost about a copy and read no
weights. So the check takes about half a second and 30 MB for a model of 70 billion weights. It is a test by example:
an operator that mixes tokens only for other values than these would pass.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Target

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.cut import STATIC, dependences
from hpcdecode.model.frontend.head_linear import HEAD_LINEAR
from hpcdecode.model.frontend.meta import meta, tensor_meta
from hpcdecode.model.frontend.mixers import MIXERS, rows_of
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.operators import EXPERT_LINEAR, PROJECTIONS, Linear
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten
IDS = (11, 7, 29, 13)
LAST_POSITION = 1 << 16  # if the model does not say how long a sequence may be
ALONE = 1  # place of the token that is run alone, too; not the one in the middle, which may be left where it is
TOLERANCE = 1e-6  # relative to the largest value of a tensor; rounding makes 1e-12, what mixes tokens more than 1e-3
DIVISOR = 97  # of integers
LARGE = 1 << 18  # elements; a larger weight is one row in memory
MATMULS: frozenset[Target] = frozenset({aten.mm.default, aten.bmm.default, aten.matmul.default})


def check_independence(trace: Trace) -> None:
    """Raise UserError, naming the operator, if a token's result depends on other tokens outside of attention."""
    ends = {n for mixer in trace.attends for n in rows_of(mixer)} | {trace.logits}
    try:
        with torch.no_grad():
            mixing = next(ExampleRun(trace).mixing(ends), None)
            if mixing is not None:  # which it was
                mixing = next(ExampleRun(trace).mixing(set(trace.graph.nodes)), mixing)
    except Exception as e:
        raise _refused(trace, f"its graph does not run on a few tokens ({first_line(e)})") from e
    if mixing is not None:
        raise _refused(trace, f"{mixing.target} mixes tokens outside of attention: rows would depend on each other")


def _refused(trace: Trace, reason: str) -> UserError:
    return UserError(f"model type {trace.facts.model_type!r} is not supported: {reason}")


class ExampleRun:
    """A run of a trace on a few tokens together, and on one of them alone, node by node.

    Args:
        trace: The trace.
    """

    def __init__(self, trace: Trace):
        last = (trace.facts.max_positions or LAST_POSITION) - 1
        ids, positions = torch.tensor(IDS), torch.tensor((1, 0, 3, last))
        self._nodes = list(trace.graph.nodes)
        self._static = {n for n, kind in dependences(trace).items() if kind == STATIC}
        self._held: dict[fx.Node, Any] = {n: widened(value) for n, value in trace.constants.items()}
        self._lanes: list[dict[fx.Node, Any]] = []
        inputs: dict[fx.Node, Any]
        for places in (list(range(len(IDS))), [ALONE]):
            inputs = {trace.ids: ids[places], trace.positions: positions[places]}
            inputs[trace.logits_indices] = torch.arange(len(places))
            if trace.hidden is not None:
                inputs[trace.hidden] = embedded(ids[places], tensor_meta(trace.hidden).one_token[-1])
            self._lanes.append(inputs)

    def mixing(self, compared: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Run the graph, and yield those of the nodes `compared` whose value for a token depends on the others."""
        dying = last_uses(self._nodes)
        for node in self._nodes:
            if node.op == "call_function" and node not in self._static:
                for lane in self._lanes:
                    lane[node] = self._result(node, lane)
                if node in compared and self._differs(node):
                    yield node
            for done in dying[node]:
                for lane in self._lanes:
                    lane.pop(done, None)

    def _differs(self, node: fx.Node) -> bool:
        about, (together, alone) = meta(node), (lane[node] for lane in self._lanes)
        return about is not None and about.token_dim is not None and not same(together, alone, about.token_dim)

    def _value(self, node: fx.Node, lane: dict[fx.Node, Any]) -> Any:
        """Return the value of a node; one that no token enters is made when something reads it."""
        if node not in self._static:
            return lane[node]
        if node not in self._held:
            self._held[node] = example_weight(node) if node.op == "placeholder" else self._result(node, {})
        return self._held[node]

    def _result(self, node: fx.Node, lane: dict[fx.Node, Any]) -> Any:
        def value(n: fx.Node) -> Any:
            return self._value(n, lane)

        if node.target in MIXERS:
            return mixed([value(n) for n in rows_of(node)], tensor_meta(node).one_token[-1])
        if node.target in PROJECTIONS:
            linear = Linear.of(node)
            x = projected(value(linear.x), linear.outputs)
            return x * (1 + value(as_node(node.args[1])) / 8)[..., None] if node.target is EXPERT_LINEAR else x
        if node.target is aten.embedding.default:
            return embedded(value(as_node(node.args[1])), tensor_meta(node).one_token[-1])
        if node.target is HEAD_LINEAR and self._is_large(as_node(node.args[1])):
            heads, outputs, inputs = tensor_meta(as_node(node.args[1])).one_token
            return projected(value(as_node(node.args[0])).unflatten(-1, (heads, inputs)), outputs).flatten(-2)
        if node.target in MATMULS and self._is_large(as_node(node.args[1])):
            return projected(value(as_node(node.args[0])), tensor_meta(node).one_token[-1])
        args: Any = fx.map_arg(node.args, value)
        kwargs: Any = dict(fx.map_arg(dict(node.kwargs), value))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        target: Any = node.target
        return target(*widened(args), **widened(kwargs))

    def _is_large(self, node: fx.Node) -> bool:
        return node in self._static and tensor_meta(node).numel_per_token > LARGE


def last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return by node those that nothing reads after it."""
    dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    seen: set[fx.Node] = set()
    for node in reversed(nodes):
        for each in (node, *node.all_input_nodes):
            if each not in seen:
                seen.add(each)
                dying[node].append(each)
    return dying


def widened(value: Any) -> Any:
    """Return a value of a graph, or an argument, with float64 in place of other floats, and complex128 of complex."""
    if isinstance(value, Tensor):
        return value.to(widened(value.dtype))
    if isinstance(value, torch.dtype):
        return torch.complex128 if value.is_complex else torch.float64 if value.is_floating_point else value
    if isinstance(value, dict):
        return {key: widened(each) for key, each in value.items()}
    return type(value)(map(widened, value)) if type(value) in (list, tuple) else value


def example_weight(node: fx.Node) -> Tensor:
    """Return small values in the shape of a weight; a large one is an expanded row.

    Integers are places, which are 0, or divisors.
    """
    about = tensor_meta(node)
    shape = about.one_token
    if not about.dtype.is_floating_point:
        divides = any(user.target is aten.remainder.Tensor and user.args[1] is node for user in node.users)
        return torch.full(shape, DIVISOR if divides else 0, dtype=about.dtype)
    if len(shape) < 2:
        return 1 + wave(about.numel_per_token).reshape(shape) / 8
    size = shape[-1] if about.numel_per_token > LARGE else about.numel_per_token
    row: Tensor = wave(size) / math.sqrt(shape[-1])
    return row.expand(shape) if size < about.numel_per_token else row.reshape(shape)


@functools.lru_cache(64)
def wave(size: int) -> Tensor:
    """Return `size` values from -1.4 to 1.4, with a mean square of 1, that do not repeat."""
    return torch.sin(torch.arange(1, size + 1, dtype=torch.float64) * 1.9) * 2**0.5


def projected(x: Tensor, outputs: int) -> Tensor:
    """Return a stand-in for the projection of [..., in] to [..., outputs]: each row depends on that row of x alone."""
    inputs = x.shape[-1]
    whole: Tensor = (x * wave(inputs)).sum(-1, keepdim=True) / math.sqrt(inputs)
    copies = x.repeat(*[1] * (x.dim() - 1), -(-outputs // inputs))[..., :outputs]
    return copies * wave(outputs) + whole


def embedded(ids: Tensor, columns: int) -> Tensor:
    """Return a stand-in for the embedding [..., columns] of ids."""
    return torch.sin(ids[..., None].to(torch.float64) * 1.3 + wave(columns) * 9)


def mixed(rows: list[Tensor], columns: int) -> Tensor:
    """Return a stand-in for attention, or a recurrence, in which each token sees itself alone."""
    seen: Tensor = sum((x.mean(1, keepdim=True) for x in rows), projected(rows[-1], columns))
    return seen


def same(together: Tensor, alone: Tensor, dim: int) -> bool:
    """Return whether a token's value alone is what it is at the place ALONE of the dimension `dim` among others."""
    among, own = together.select(dim, ALONE), alone.select(dim, 0)
    if not among.is_floating_point():
        return torch.equal(among, own)
    finite = among[among.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return bool(((among == own) | ((among - own).abs() <= TOLERANCE * size)).all())
