"""GEMMs of two weights whose results gate each other, against plain torch."""

from __future__ import annotations

import operator
from functools import partial

import pytest
import torch
from torch import fx
from torch.nn.functional import gelu, silu

from hpcdecode._ops_cpu import Chain, Op, Product
from hpcdecode.model import load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.compile import compile_graph
from hpcdecode.model.lower.few_bits import Quantised
from hpcdecode.model.lower.instruction import TYPES
from tests.support.graphs import both_ways
from tests.support.isas import OWN_GEMMS, use_isa

aten = torch.ops.aten
GATES = [(Op.silu, silu), (Op.gelu_tanh, partial(gelu, approximate="tanh"))]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=OWN_GEMMS)
def isa(monkeypatch, request):
    use_isa(monkeypatch, request.param)


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(op: Op, x: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """Beside rows of other memory, to see what is written there."""
    y = torch.full((len(x) + 1, outputs + 3), 7.0, dtype=x.dtype)
    kind, words = TYPES[x.dtype], x.shape[1] * x.element_size() // 4
    work = Product(kind, kind, words, 2 * outputs, packed_weights.isa(), op)
    steps = [x.stride(0) * x.element_size(), 0, y.stride(0) * y.element_size()]
    places = [t.data_ptr() for t in (x, packed, y)]
    Chain([(work, [0, 1, 2])], 3, []).run(len(x), torch.get_num_threads(), places, steps)
    assert (y[-1] == 7).all() and (y[:, outputs:] == 7).all()
    return y[:-1, :outputs]


@pytest.mark.parametrize("rows", [1, 3, 14, 57, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "function"), GATES)
def test_gated_products_against_float64(op, function, dtype, rows):
    for inputs, outputs in ((64, 16), (96, 80), (260, 48)):
        x, one, other = (numbers(dtype, n, inputs, seed=i) for i, n in enumerate((rows, outputs, outputs)))
        biases = [numbers(dtype, outputs, seed=3 + i) for i in range(2)]
        y = multiply(op, x, packed_weights.pack_gated(one, other, biases), outputs)
        a, b = (
            (x.double() @ w.double().t() + c.double()).to(dtype).double()
            for w, c in zip((one, other), biases, strict=True)
        )
        wanted = function(a).to(dtype).double() * b
        tolerance = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
        torch.testing.assert_close(y.double(), wanted, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "function"), GATES)
def test_what_a_gate_makes_of_any_number(op, function, dtype):
    """x and 1, by weights of 1."""
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-3, 5.0, -5.0, 60.0, -60.0, 90.0, -90.0, 1e13, -1e13, 3e38, -3e38])
    rows = torch.stack([x, torch.ones(len(x))], 1).to(dtype)
    pair = [torch.tensor([weights]).to(dtype).expand(16, 2).contiguous() for weights in ([1.0, 0.0], [0.0, 1.0])]
    y = multiply(op, rows, packed_weights.pack_gated(*pair), 16)
    wanted = function(rows[:, :1].double()).expand(-1, 16)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-30)
    assert multiply(op, rows * torch.nan, packed_weights.pack_gated(*pair), 16).isnan().all()


def graph_of(make, width: int = 48, dtype: torch.dtype = torch.bfloat16) -> fx.Graph:
    """What `make` adds to a graph of x [T, 32], two weights [width, 32] and two biases."""
    graph = fx.Graph()
    given = []
    for name, shape in (
        ("x0", ("T", 32)),
        *((f"w{i}", (width, 32)) for i in (0, 1)),
        ("w2", (width,)),
        ("w3", (width,)),
    ):
        given.append(graph.placeholder(name))
        given[-1].meta["about"] = Meta.of(dtype, shape)

    def call(target, *args, width: int = width, **options) -> fx.Node:
        node = graph.call_function(target, args, options)
        node.meta["about"] = Meta.of(dtype, ("T", width))
        return node

    graph.output((make(call, *given),))
    return graph


def gated(call, x, one, other, *_):
    return call(aten.mul.Tensor, call(aten.silu.default, call(aten.linear.default, x, one)), linear(call, x, other))


def linear(call, x, weight, *bias):
    return call(aten.linear.default, x, weight, *bias)


def swapped(call, x, one, other, *_):
    up = linear(call, x, other)
    return call(aten.mul.Tensor, up, call(aten.gelu.default, linear(call, x, one), approximate="tanh"))


def with_biases(call, x, one, other, *biases):
    a, b = linear(call, x, one, biases[0]), linear(call, x, other, biases[1])
    return call(aten.mul.Tensor, call(aten.silu.default, a), b)


def one_bias(call, x, one, other, bias, _):
    a, b = linear(call, x, one, bias), linear(call, x, other)
    return call(aten.mul.Tensor, call(aten.silu.default, a), b)


def by_itself(call, x, one, *_):
    a = linear(call, x, one)
    return call(aten.mul.Tensor, call(aten.silu.default, a), a)


def read_twice(call, x, one, other, *_):
    a = call(aten.silu.default, linear(call, x, one))
    return call(aten.add.Tensor, call(aten.mul.Tensor, a, linear(call, x, other)), a)


def by_erf(call, x, one, other, *_):
    a, b = linear(call, x, one), linear(call, x, other)
    return call(aten.mul.Tensor, call(aten.gelu.default, a), b)


def halves(call, x, one, _, bias, *__, order=(0, 1), parts=2):
    width = bias.meta["about"].shape[0] // parts
    whole = linear(call, x, one, bias)
    split = call(aten.split.Tensor, whole, width, -1)
    a, b = (call(operator.getitem, split, i, width=width) for i in order)
    return call(aten.mul.Tensor, b, call(aten.silu.default, a, width=width), width=width)


@pytest.mark.parametrize(
    ("make", "width", "taken"),
    [
        (gated, 48, True),
        (swapped, 48, True),
        (with_biases, 48, True),
        (gated, 40, False),
        (one_bias, 48, False),
        (by_itself, 48, False),
        (read_twice, 48, False),
        (by_erf, 48, False),
        (halves, 96, True),
        (halves, 48, False),
        (partial(halves, order=(1, 0)), 96, False),
        (partial(halves, parts=3), 96, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_graphs_have_gated_products(make, width, taken, dtype):
    compiled, want, got = both_ways(graph_of(make, width, dtype), CPU)
    assert any(r.form == "packed gated" for r in compiled.recipes) == taken
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=2e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(
    ("name", "taken"), [("llama3", True), ("qwen2", True), ("gemma2", True), ("phi3", True), ("gpt2", False)]
)
def test_which_models_have_gated_products(checkpoint, name, taken):
    model = load_split(checkpoint(name), dtype="bfloat16", weights=False)
    compiled = [both_ways(group.graph, CPU)[0] for group in model.split.groups]
    assert any(r.form == "packed gated" for c in compiled for r in c.recipes) == taken


def test_a_projection_may_read_another():
    """Projections are replaced one after the other, so that the second reads what has replaced the first."""
    graph = graph_of(lambda call, x, one, other, *_: linear(call, linear(call, x, one), other), 32, torch.float32)
    _, want, got = both_ways(graph, CPU)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    compile_graph(graph, CPU, Quantised("int8"))


def test_int8_weights_have_no_gates():
    forms = [r.form for r in compile_graph(graph_of(gated), CPU, Quantised("int8")).recipes]
    assert forms == ["packed int8"]


def test_a_gate_wants_whole_groups():
    kind = TYPES[torch.bfloat16]
    with pytest.raises(ValueError, match="expected whole panels for a gate"):
        Product(kind, kind, 32, 48, packed_weights.isa(), Op.silu)
    with pytest.raises(ValueError, match="has none of these types"):
        Product(kind, kind, 32, 64, packed_weights.isa(), Op.relu)
