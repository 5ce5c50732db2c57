"""Routers of experts, and products of complex numbers, as fused kernels: against the plain graph, on every ISA."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from hpcdecode._ops_cpu import Chain, FusedKernel, Op, Step, Type
from hpcdecode.model import load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower.chain import Chain as ChainCall
from hpcdecode.model.lower.chain import chained
from hpcdecode.model.lower.complex_numbers import without_complex
from hpcdecode.model.lower.fuse import fuse
from tests.support.graphs import both_ways
from tests.support.isas import use_isa

aten = torch.ops.aten
EXPERTS, GROUPS = 24, 4


@pytest.fixture(params=["generic", "avx2", "avx512", "amx"])
def isa(request, monkeypatch):
    use_isa(monkeypatch, request.param)
    return request.param


class Graph:
    """A graph over rows of tokens."""

    def __init__(self, dtype: torch.dtype, *shape: int | str):
        self.graph, self.dtype = fx.Graph(), dtype
        self.x = self.graph.placeholder("x0")
        self.x.meta["about"] = Meta.of(dtype, shape)

    def call(self, target, *args, shape: tuple, dtype: torch.dtype | None = None, **kwargs) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["about"] = Meta.of(dtype or self.dtype, shape)
        return node

    def top(self, x: fx.Node, count: int, shape: tuple, **kwargs) -> tuple[fx.Node, fx.Node]:
        found = self.graph.call_function(aten.topk.default, (x, count, -1), kwargs)
        values = self.call(operator.getitem, found, 0, shape=(*shape, count))
        return values, self.call(operator.getitem, found, 1, shape=(*shape, count), dtype=torch.int64)

    def both(self, *results: fx.Node):
        self.graph.output(results)
        made = chained(fuse(self.graph))
        calls = [n.target for n in made.nodes if n.op == "call_function" and n.target is not operator.getitem]
        assert all(isinstance(target, ChainCall) for target in calls) and len(calls) == 1
        return fx.GraphModule({}, self.graph).forward, fx.GraphModule({}, made).forward


def scores(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows without equal numbers."""
    rows = [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i)) for i in range(tokens)]
    return (torch.stack(rows) / 4 - 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, EXPERTS])
def test_softmax_and_the_largest(isa, dtype, count):
    build = Graph(dtype, "T", EXPERTS)
    weights = build.call(aten.softmax.int, build.x, -1, torch.float32, shape=("T", EXPERTS), dtype=torch.float32)
    values, places = build.top(build.x, count, ("T",))
    picked = build.call(aten.gather.default, weights, 1, places, shape=("T", count), dtype=torch.float32)
    plain, fused = build.both(weights, values, places, picked)
    x = scores(9, dtype)
    wanted, got = plain(x), fused(x)
    for a, b in zip(wanted, got, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=3e-6, atol=1e-7)
    assert torch.equal(wanted[2], got[2])
    assert all(torch.equal(torch.cat([fused(row[None])[i] for row in x]), got[i]) for i in range(4))


def test_equal_numbers_and_those_that_are_none_have_places_of_their_own(isa):
    build = Graph(torch.float32, "T", 6)
    _, fused = build.both(build.top(build.x, 4, ("T",))[1])
    none = float("nan")
    x = torch.tensor([[2.0, 5, 5, 2, 5, 1], [none] * 6, [0, none, 3, none, 1, 2], [-torch.inf] * 6])
    (places,) = fused(x)
    assert places[0].tolist() == [1, 2, 4, 0] and places[3].tolist() == [0, 1, 2, 3]
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in places.tolist())


@pytest.mark.parametrize("limit", [0.0, float("-inf")])
def test_experts_of_the_best_groups(isa, limit):
    """As DeepSeek-V2 and V3 write it."""
    build, each = Graph(torch.float32, "T", EXPERTS), EXPERTS // GROUPS
    groups = build.call(aten.view.default, build.x, [-1, GROUPS, each], shape=("T", GROUPS, each))
    two, _ = build.top(groups, 2, ("T", GROUPS))
    best = build.call(aten.sum.dim_IntList, two, [-1], shape=("T", GROUPS))
    found = build.graph.call_function(aten.max.dim, (groups, -1))
    best = build.call(
        aten.add.Tensor, best, build.call(operator.getitem, found, 0, shape=("T", GROUPS)), shape=("T", GROUPS)
    )
    _, chosen = build.top(best, 2, ("T",), sorted=False)
    zeros = build.call(aten.zeros_like.default, best, shape=("T", GROUPS))
    mask = build.call(aten.scatter.value, zeros, 1, chosen, 1, shape=("T", GROUPS))
    mask = build.call(aten.unsqueeze.default, mask, -1, shape=("T", GROUPS, 1))
    mask = build.call(aten.expand.default, mask, [-1, GROUPS, each], shape=("T", GROUPS, each))
    mask = build.call(aten.reshape.default, mask, [-1, EXPERTS], shape=("T", EXPERTS))
    mask = build.call(aten._to_copy.default, mask, shape=("T", EXPERTS), dtype=torch.bool)
    mask.kwargs = {"dtype": torch.bool}
    others = build.call(aten.bitwise_not.default, mask, shape=("T", EXPERTS), dtype=torch.bool)
    left = build.call(aten.masked_fill.Scalar, build.x, others, limit, shape=("T", EXPERTS))
    _, places = build.top(left, 3, ("T",))
    plain, fused = build.both(left, places, others)
    x = torch.rand(30, EXPERTS, generator=torch.Generator().manual_seed(1))
    for a, b in zip(plain(x), fused(x), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_complex_numbers(isa, dtype):
    heads, half = 3, 8
    build = Graph(dtype, 1, heads, "T", 2 * half)
    turn = build.graph.placeholder("x1")
    turn.meta["about"] = Meta.of(torch.complex64, (1, "T", half))
    wide = build.call(aten._to_copy.default, build.x, shape=(1, heads, "T", 2 * half), dtype=torch.float32)
    wide.kwargs = {"dtype": torch.float32}
    pairs = build.call(
        aten.view.default, wide, [1, heads, -1, half, 2], shape=(1, heads, "T", half, 2), dtype=torch.float32
    )
    shape = (1, heads, "T", half)
    z = build.call(aten.view_as_complex.default, pairs, shape=shape, dtype=torch.complex64)
    w = build.call(aten.unsqueeze.default, turn, 1, shape=(1, 1, "T", half), dtype=torch.complex64)
    product = build.call(aten.mul.Tensor, z, w, shape=shape, dtype=torch.complex64)
    real = build.call(aten.view_as_real.default, product, shape=(*shape, 2), dtype=torch.float32)
    y = build.call(
        aten.view.default, real, [1, heads, -1, 2 * half], shape=(1, heads, "T", 2 * half), dtype=torch.float32
    )
    y = build.call(aten._to_copy.default, y, shape=(1, heads, "T", 2 * half))
    y.kwargs = {"dtype": dtype}
    build.graph.output((y,))
    plain = fx.GraphModule({}, build.graph).forward
    made = fx.Graph()
    made.output(made.graph_copy(build.graph, {}))
    without_complex(made)
    kinds = {n.meta["about"].dtype for n in made.nodes if n.op == "call_function"}
    assert torch.complex64 not in kinds
    fused = fx.GraphModule({}, chained(fuse(made))).forward
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, heads, 7, 2 * half, generator=generator).to(dtype)
    turn = torch.polar(torch.ones(1, 7, half), torch.randn(1, 7, half, generator=generator))
    torch.testing.assert_close(
        fused(x, turn)[0], plain(x, turn)[0], rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_linear", "gpt_oss"])
def test_slices_equal_their_plain_graphs(checkpoint, name, dtype):
    """Their routers choose the same experts, and nothing is left to torch between attentions."""
    model = load_split(checkpoint(name), dtype=dtype, weights=False)
    for group in model.split.groups:
        compiled, want, got = both_ways(group.graph, model.device)
        assert not any(n.target is aten.topk.default for n in compiled.graph.nodes)
        for a, b in ((a, b) for a, b in zip(want, got, strict=True) if a.numel()):
            size = max(1.0, float(a.abs().max()) / 10)
            torch.testing.assert_close(a, b, rtol=0, atol=(2e-5 if dtype == "float32" else 0.1) * size)


def test_places_outside_a_row_are_refused():
    dense, none = (0, 0, 1), (0, 0, 0)
    for op, count, width in ((Op.top, 4, 3), (Op.top, 4, 30), (Op.pick, 4, 30), (Op.mark, 4, 30), (Op.pick, 4, 0)):
        step = Step(op, Type.float32, (1, 1, count), 16, dense, 0, dense, 8, dense, float(width))
        with pytest.raises(ValueError, match="leaves the scratch memory"):
            FusedKernel([], [step], 24, 0, "generic")
    for op in (Op.pick, Op.fill):
        step = Step(op, Type.float32, (1, 1, 4), 16, dense, 0, dense, None, none, 4.0)
        with pytest.raises(ValueError, match="leaves the scratch memory"):
            FusedKernel([], [step], 24, 0, "generic")
    step = Step(Op.neg, Type.int64, (1, 1, 4), 16, dense, 0, dense, None, none, 0.0)
    with pytest.raises(ValueError, match="leaves the scratch memory"):
        FusedKernel([], [step], 24, 0, "generic")
    with pytest.raises(ValueError, match="expected 4 tensors of 1 for every stage"):
        experts_alone()


def experts_alone() -> Chain:
    from hpcdecode._ops_cpu import ExpertProduct, Product
    from hpcdecode.attention.base import isa

    product = Product(Type.float32, Type.float32, 8, 32, isa())
    return Chain([(ExpertProduct(product, 2, 0, 2, True), [0, 0, 0])], 1, [])
