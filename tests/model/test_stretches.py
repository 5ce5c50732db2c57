"""Slices that are cut at sums: each stretch on its own gives what the whole graph gives."""

from __future__ import annotations

import torch
from torch import fx

from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.stretches import stretches_of

aten = torch.ops.aten


def graph_with(sums: int) -> fx.Graph:
    """x1 + sum(x0 w0), then again of that, with a size and a late use of the first input."""
    ops.define()
    graph = fx.Graph()
    about = Meta.of(torch.float32, ("T", 8))
    x = [graph.placeholder(f"x{i}") for i in range(2)]
    w = [graph.placeholder(f"w{i}") for i in range(3)]
    for node in x:
        node.meta["about"] = about
    for node in w:
        node.meta["about"] = Meta.of(torch.float32, (8, 8))

    def call(target, *args, kind=about):
        node = graph.call_function(target, args)
        node.meta["about"] = kind
        return node

    size = call(aten.sym_size.int, x[0], 0, kind="T")
    y, early = x[1], call(aten.mul.Tensor, x[0], 2.0)
    for i in range(3):
        part = call(aten.linear.default, y if i else x[0], w[i])
        if i < sums:
            part = call(torch.ops.hpcdecode.member_sum.default, part)
        y = call(aten.add.Tensor, call(aten.view.default, part, [size, 8]), y)
    graph.output((call(aten.add.Tensor, y, early), x[1]))
    return graph


def run_whole(graph, values, weights, members):
    """What the graph returns if every sum is over so many members alike."""

    class Interpreter(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is torch.ops.hpcdecode.member_sum.default:
                return args[0] * members
            return super().call_function(target, args, kwargs)

    return Interpreter(fx.GraphModule({}, graph)).run(*values, *weights)


def test_stretches_give_what_the_slice_gives():
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(5, 8, generator=generator) for _ in range(2)]
    weights = [torch.randn(8, 8, generator=generator) for _ in range(3)]
    for sums in range(4):
        graph = graph_with(sums)
        stretches = stretches_of(graph)
        assert len(stretches) == sums + 1 and sorted(n for s in stretches for n in s.weights) == [0, 1, 2]
        values = list(given)
        for number, stretch in enumerate(stretches):
            own = [values[i] for i in stretch.takes] + [weights[i] for i in stretch.weights]
            made = fx.GraphModule({}, stretch.graph)(*own)
            values += [made[0] * 3, *made[1:]] if number < sums else made
        for a, b in zip(values[-2:], run_whole(graph, given, weights, 3), strict=True):
            torch.testing.assert_close(a, b)


def test_a_slice_without_sums_stays_as_it_is():
    graph = graph_with(0)
    (only,) = stretches_of(graph)
    assert only.graph is graph and only.takes == (0, 1) and only.weights == (0, 1, 2)
