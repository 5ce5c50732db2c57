"""Fused kernels and packed projections against the plain graph, and their independence of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hpcdecode._ops_cpu import Chain, FusedKernel, Op, Step, Type
from hpcdecode.model import load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.chain import chained
from hpcdecode.model.lower.columns import COLUMNS, in_columns
from hpcdecode.model.lower.fuse import fuse
from hpcdecode.model.lower.handlers import HANDLERS
from hpcdecode.model.lower.instruction import place
from hpcdecode.model.lower.lowering import Lowering
from hpcdecode.model.lower.stage import Stage
from tests.support.graphs import both_ways
from tests.support.isas import use_isa

pytestmark = pytest.mark.usefixtures("all_cores")

aten = torch.ops.aten
WIDTH = 48
UNARY = ("neg", "sqrt", "rsqrt", "reciprocal", "exp", "tanh", "sigmoid", "silu", "relu", "softplus")
BINARY = ("add", "sub", "mul", "div")
ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    use_isa(monkeypatch, request.param)
    return request.param


class Builder:
    """A graph over rows of tokens, and its plain and fused forms."""

    def __init__(self):
        self.graph = fx.Graph()

    def input(self, name: str, dtype: torch.dtype, *shape: int | str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["about"] = Meta.of(dtype, shape)
        return node

    def call(self, target, *args, shape: tuple, dtype: torch.dtype, **kwargs) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["about"] = Meta.of(dtype, shape)
        return node

    def finish(self, *results: fx.Node):
        self.graph.output(results)
        fused = fuse(self.graph)
        programs = [n for n in fused.nodes if isinstance(n.target, Stage)]
        return fx.GraphModule({}, self.graph).forward, fx.GraphModule({}, chained(fused)).forward, programs


def assert_same(plain, fused, *inputs):
    for want, got in zip(plain(*inputs), fused(*inputs), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        exact = want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=3e-6 if exact else 8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNARY)
def test_unary(isa, name, dtype):
    build = Builder()
    x = build.input("x0", dtype, "T", WIDTH)
    plain, fused, programs = build.finish(build.call(getattr(aten, name).default, x, shape=("T", WIDTH), dtype=dtype))
    assert len(programs) == 1
    values = torch.linspace(-30, 30, 5 * WIDTH) if name not in ("sqrt", "rsqrt") else torch.linspace(0.01, 9, 5 * WIDTH)
    if name in ("tanh", "sigmoid", "silu"):
        values[0], values[-1] = -3e38, 3e38
    assert_same(plain, fused, values.view(5, WIDTH).to(dtype))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(isa, approximate):
    build = Builder()
    x = build.input("x0", torch.float32, "T", WIDTH)
    y = build.call(aten.gelu.default, x, shape=("T", WIDTH), dtype=torch.float32, approximate=approximate)
    plain, fused, _ = build.finish(y)
    assert_same(plain, fused, torch.linspace(-8, 8, 3 * WIDTH).view(3, WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("other", [(1, "T", WIDTH), (1, "T", 1), (WIDTH,), (), 0.7])
def test_binary_broadcasts(isa, name, dtype, other):
    build, generator = Builder(), torch.Generator().manual_seed(0)
    shape = (1, "T", WIDTH)
    x = build.input("x0", dtype, *shape)
    inputs = [torch.randn(1, 6, WIDTH, generator=generator).to(dtype)]
    operand = other
    if isinstance(other, tuple):
        operand = build.input("x1", dtype, *other)
        inputs.append((torch.rand([6 if n == "T" else n for n in other], generator=generator) + 0.5).to(dtype))
    plain, fused, programs = build.finish(build.call(getattr(aten, name).Tensor, x, operand, shape=shape, dtype=dtype))
    assert len(programs) == 1
    assert_same(plain, fused, *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_gate_runs_in_columns(isa, dtype):
    """As a slice has it: both halves of one product, and a number of the token."""
    width = 2 * COLUMNS + 300
    build, shape = Builder(), ("T", width)
    both, s, w = (build.input(*i) for i in (("x0", dtype, "T", 2 * width), ("x1", dtype, "T", 1), ("w0", dtype, width)))
    gate, up = (build.call(aten.slice.Tensor, both, 1, at, at + width, shape=shape, dtype=dtype) for at in (0, width))
    y = build.call(aten.silu.default, gate, shape=shape, dtype=dtype)
    y = build.call(aten.mul.Tensor, y, up, shape=shape, dtype=dtype)
    half = build.call(aten.mul.Tensor, s, 0.5, shape=("T", 1), dtype=dtype)
    y = build.call(aten.mul.Tensor, y, half, shape=shape, dtype=dtype)
    y = build.call(aten.add.Tensor, y, w, shape=shape, dtype=dtype)
    plain, fused, programs = build.finish(y)
    assert len(programs) == 1
    inputs = (torch.randn(5, n, generator=torch.Generator().manual_seed(2)).to(dtype) for n in (2 * width, 1))
    assert_same(plain, fused, *inputs, torch.linspace(-3, 3, width).to(dtype))


def test_a_wide_program_whose_number_is_one_of_its_columns_is_left_whole():
    build, width = Builder(), 2 * COLUMNS
    x = build.input("x0", torch.float32, "T", width)
    one = build.call(aten.slice.Tensor, x, 1, 3, 4, shape=("T", 1), dtype=torch.float32)
    half = build.call(aten.mul.Tensor, one, 0.5, shape=("T", 1), dtype=torch.float32)
    y = build.call(aten.mul.Tensor, x, half, shape=("T", width), dtype=torch.float32)
    plain, fused, _ = build.finish(y)
    assert_same(plain, fused, torch.randn(7, width, generator=torch.Generator().manual_seed(5)))


def test_columns_follow_one_another_in_the_same_memory():
    """A program of a wide product: its scratch memory is that of one block."""
    lowering, node = Lowering(), fx.Graph().placeholder("x0")
    node.meta["about"] = Meta.of(torch.float32, ("T", 10 * COLUMNS))
    lowering.load(node, 0)
    value = lowering.step(Op.neg, lowering.values[node].shape, lowering.values[node])
    lowering.values[node] = value
    lowering.store(node, 1)
    body = in_columns(lowering.setup, lowering.body)
    assert [i.op for i in body] == [Op.load, Op.neg, Op.store] * 10
    assert [i.first for i in body[::3]] == [i * COLUMNS for i in range(10)]
    assert place([], body) == 2 * COLUMNS


def test_rotary_embedding_through_views_slices_and_cat(isa):
    build, d, heads = Builder(), 16, 3
    bf16 = torch.bfloat16
    x, cos = build.input("x0", bf16, "T", heads * d), build.input("x1", bf16, 1, 1, "T", d)
    size = build.graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["about"] = "T"
    four = (1, heads, "T", d)
    q = build.call(aten.view.default, x, [1, size, -1, d], shape=(1, "T", heads, d), dtype=bf16)
    q = build.call(aten.transpose.int, q, 1, 2, shape=four, dtype=bf16)
    low = build.call(aten.slice.Tensor, q, 3, 0, d // 2, shape=(*four[:3], d // 2), dtype=bf16)
    high = build.call(aten.slice.Tensor, q, 3, d // 2, 1 << 62, shape=(*four[:3], d // 2), dtype=bf16)
    minus = build.call(aten.neg.default, high, shape=(*four[:3], d // 2), dtype=bf16)
    turned = build.call(aten.cat.default, [minus, low], -1, shape=four, dtype=bf16)
    one = build.call(aten.mul.Tensor, q, cos, shape=four, dtype=bf16)
    two = build.call(aten.mul.Tensor, turned, cos, shape=four, dtype=bf16)
    both = build.call(aten.add.Tensor, one, two, shape=four, dtype=bf16)
    back = build.call(aten.transpose.int, both, 1, 2, shape=(1, "T", heads, d), dtype=bf16)
    rows = build.call(aten.reshape.default, back, [size, -1], shape=("T", heads * d), dtype=bf16)
    plain, fused, programs = build.finish(rows, both)
    assert len(programs) == 1
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(7, heads * d, generator=generator), torch.randn(1, 1, 7, d, generator=generator)
    for want, got in zip(plain(*(t.to(bf16) for t in inputs)), fused(*(t.to(bf16) for t in inputs)), strict=True):
        assert torch.equal(want, got)  # a product and a sum round alike everywhere


def test_what_has_no_steps_stays_in_the_graph():
    build = Builder()
    x = build.input("x0", torch.float32, "T", WIDTH)
    y = build.call(aten.mul.Tensor, x, 2.0, shape=("T", WIDTH), dtype=torch.float32)
    z = build.call(aten.cumsum.default, y, 0, shape=("T", WIDTH), dtype=torch.float32)
    whole = build.call(aten.sum.dim_IntList, z, [0], True, shape=(1, WIDTH), dtype=torch.float32)
    last = build.call(aten.sub.Tensor, z, whole, shape=("T", WIDTH), dtype=torch.float32)
    plain, fused, programs = build.finish(last)
    assert aten.cumsum.default not in HANDLERS and len(programs) == 2
    assert_same(plain, fused, torch.randn(9, WIDTH))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt2", "phi3", "mixtral"])
def test_slices_equal_their_plain_graphs(isa, checkpoint, name, dtype):
    model = load_split(checkpoint(name), dtype=dtype, weights=False)
    for group in model.split.groups:
        _, want, got = both_ways(group.graph, model.device)
        for a, b in zip(want, got, strict=True):
            size = max(1.0, float(a.abs().max()) / 10)  # experts by random numbers make large ones
            torch.testing.assert_close(a, b, rtol=0, atol=(2e-5 if dtype == "float32" else 0.1) * size)


def test_a_token_does_not_depend_on_its_batch_or_on_threads():
    build = Builder()
    x, w = build.input("x0", torch.bfloat16, "T", WIDTH), build.input("w0", torch.bfloat16, WIDTH)
    y = build.call(aten.layer_norm.default, x, [WIDTH], w, w, 1e-5, shape=("T", WIDTH), dtype=torch.bfloat16)
    y = build.call(aten.gelu.default, y, shape=("T", WIDTH), dtype=torch.bfloat16)
    _, fused, _ = build.finish(y)
    rows, weight = torch.randn(37, WIDTH).bfloat16(), torch.randn(WIDTH).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        (together,) = fused(rows, weight)
        torch.set_num_threads(1)
        assert torch.equal(fused(rows, weight)[0], together)
    finally:
        torch.set_num_threads(before)
    alone = torch.cat([fused(row[None], weight)[0] for row in rows])
    assert torch.equal(alone, together)


def test_steps_outside_the_scratch_memory_are_refused():
    dense, none = (0, 0, 1), (0, 0, 0)
    step = Step(Op.neg, Type.float32, (1, 1, 16), 24, dense, 0, dense, None, none, 0.0)
    with pytest.raises(ValueError, match="leaves the scratch memory"):
        FusedKernel([], [step], 32, 0, "generic")
    with pytest.raises(ValueError, match="no fused kernels for 'sse9'"):
        FusedKernel([], [], 0, 0, "sse9")
    with pytest.raises(ValueError, match="expected 1 tensors, got 0"):
        Chain([(FusedKernel([], [], 16, 1, "generic"), [0])], 1, []).run(1, 1, [], [])
    with pytest.raises(ValueError, match="expected 1 tensors of 1 for every stage"):
        Chain([(FusedKernel([], [], 16, 1, "generic"), [1])], 1, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [16, 96, 576, 640, 4096, 8192, 11008])
def test_rotation(isa, inputs, dtype):
    builder = Builder()
    x = builder.input("x0", dtype, "T", inputs)
    turned = builder.call(quantize.rotated, x, shape=("T", inputs), dtype=torch.float32)
    plain, fused, programs = builder.finish(turned)
    rows = torch.randn(5, inputs).to(dtype)
    torch.testing.assert_close(fused(rows)[0], plain(rows)[0], rtol=1e-5, atol=1e-5)
    assert len(programs) == 1 and torch.equal(fused(rows[2:3])[0], fused(rows)[0][2:3])
