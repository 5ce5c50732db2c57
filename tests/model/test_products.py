"""GEMMs of packed weights, and chains of them and fused kernels, against plain torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from hpcdecode._ops_cpu import Chain, Op, Product, Type
from hpcdecode.model import load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.chain import Chain as ChainCall
from hpcdecode.model.lower.compile import compile_graph
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.system.memory import huge_zeros
from tests.support.graphs import both_ways
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.mappings import about_mapping

pytestmark = pytest.mark.usefixtures("all_cores")

aten = torch.ops.aten
KINDS = [
    (isa, *types)
    for isa in OWN_GEMMS
    for types in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.int8, torch.bfloat16),
    )
]


@pytest.fixture
def use(monkeypatch):
    return partial(use_isa, monkeypatch)


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def multiply(x: torch.Tensor, packed: torch.Tensor, outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Beside rows of other memory, to see what is written there."""
    y = torch.full((len(x) + 1, outputs + 3), 7.0, dtype=dtype)
    words = x.shape[1] * x.element_size() // 4
    work = Product(TYPES[x.dtype], TYPES[dtype], words, outputs, packed_weights.isa())
    strides = [t.stride(0) * t.element_size() for t in (x, y)]
    places = [t.data_ptr() for t in (x, packed, y)]
    Chain([(work, [0, 1, 2])], 3, []).run(len(x), torch.get_num_threads(), places, [strides[0], 0, strides[1]])
    assert (y[-1] == 7).all() and (y[:, outputs:] == 7).all()
    return y[:-1, :outputs]


@pytest.mark.parametrize("rows", [1, 2, 13, 15, 28, 57, 113, 250])
@pytest.mark.parametrize(("isa", "dtype", "out"), KINDS)
def test_products_against_float64(use, threads, isa, dtype, out, rows):
    use(isa)
    for inputs, outputs in ((64, 32), (96, 160), (12, 5), (260, 47), (8, 70)):
        x, weight = numbers(dtype, rows, inputs), numbers(dtype, outputs, inputs, seed=1)
        wanted = x.double() @ weight.double().t()
        if dtype == torch.int8:
            by = torch.rand(outputs, generator=torch.Generator().manual_seed(2)) + 0.5
            packed, wanted = packed_weights.pack_int8(weight, by), wanted * by.double()
        else:
            bias = numbers(dtype, outputs, seed=3)
            parts = weight.tensor_split([outputs // 3])
            packed, wanted = packed_weights.pack(parts, bias), wanted + bias.double()
        y = multiply(x, packed, outputs, out)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-6 if out == torch.float32 else 2**-8, atol=2e-5)


@pytest.mark.parametrize(("isa", "dtype", "out"), KINDS)
def test_a_row_does_not_depend_on_those_beside_it(use, threads, isa, dtype, out):
    use(isa)
    x, weight = numbers(dtype, 130, 300), numbers(dtype, 90, 300, seed=1)
    packed = packed_weights.pack_int8(weight, torch.ones(90)) if dtype == torch.int8 else packed_weights.pack([weight])
    together = multiply(x, packed, 90, out)
    for part in (slice(0, 1), slice(1, 20), slice(20, 120), slice(120, 130)):
        assert torch.equal(multiply(x[part], packed, 90, out), together[part])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_packed_weights_lie_in_huge_pages():
    packed = packed_weights.pack([numbers(torch.bfloat16, 4096, 1024)])
    assert packed.data_ptr() % (2 << 20) == 0 and "hg" in about_mapping(packed.data_ptr())["VmFlags"].split()


@pytest.mark.parametrize("nbytes", [4, 4096, (2 << 20) - 4, 2 << 20, (6 << 20) + 100])
def test_huge_zeros_are_zeros_of_any_size(nbytes):
    memory = huge_zeros(nbytes)
    assert len(memory) == nbytes and not memory.any()
    memory.fill_(7)
    assert memory.sum(dtype=torch.int64) == 7 * nbytes


@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_rows_may_lie_apart(use, isa):
    use(isa)
    whole, weight = numbers(torch.float32, 20, 200), numbers(torch.float32, 40, 64, seed=1)
    x = whole[:, 100:164]
    y = multiply(x, packed_weights.pack([weight]), 40, torch.float32)
    torch.testing.assert_close(y, x @ weight.t())


@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_a_slice_is_one_chain(use, checkpoint, isa):
    """From an attention's output to the next q, k and v, without a call between."""
    use(isa)
    model = load_split(checkpoint("llama3"), dtype="float32", weights=False)
    (middle,) = [group for group in model.split.groups if len(group.slices) > 1]
    compiled = compile_graph(middle.graph, model.device)
    calls = [n for n in compiled.graph.nodes if isinstance(n.target, ChainCall)]
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3", "gemma2", "gpt2", "qwen2"])
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_slices_equal_their_plain_graphs_whatever_the_threads(use, threads, checkpoint, isa, name, dtype):
    use(isa)
    model = load_split(checkpoint(name), dtype=dtype, weights=False)
    for group in model.split.groups:
        compiled, want, got = both_ways(group.graph, model.device)
        assert any(r.form == "packed" for r in compiled.recipes)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_logits_have_the_same_bits_in_any_batch(use, threads, checkpoint, isa, dtype):
    use(isa)
    model = load_split(checkpoint("llama3"), dtype=dtype)
    ids = torch.arange(5, 205)
    outputs = [numbers(model.dtype, 200, s.out_columns, seed=i) for i, s in enumerate(model.attends)]

    def run(some: slice) -> torch.Tensor:
        o, context = None, (ids[some], ids[some], torch.arange(len(ids[some])))
        for i, output in enumerate(outputs):
            *_, context = model.slice(i, o, context)
            o = output[some]
        return model.logits(o, context)

    together = run(slice(None))
    for some in (slice(0, 1), slice(1, 19), slice(19, 76), slice(76, 200)):
        assert torch.equal(run(some), together[some])


def test_what_a_machine_has_no_products_of_is_left_to_onednn(monkeypatch):
    monkeypatch.setenv("HPCDECODE_ISA", "generic")
    x, weight, y = (Meta.of(torch.float32, shape) for shape in (("T", 64), (32, 64), ("T", 32)))
    assert packed_weights.gemm(x, weight, y) is None
    assert not Product.offered(Type.bfloat16, Type.int8, "generic")
    with pytest.raises(ValueError, match="product: generic has none of these types"):
        Product(Type.float32, Type.float32, 64, 32, "generic")


@pytest.mark.parametrize(
    ("dtype", "x", "reason"),
    [
        (torch.bfloat16, ("T", 63), "inputs that fill no words"),
        (torch.bfloat16, ("T", 4, 64), "several rows a token"),
        (torch.float16, ("T", 64), "no such products"),
        (torch.bfloat16, (7, 64), "no tokens"),
    ],
)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_what_has_no_gemm_of_packed_weights(use, isa, dtype, x, reason):
    use(isa)
    y = Meta.of(dtype, (*x[:-1], 32))
    assert packed_weights.gemm(Meta.of(dtype, x), Meta.of(dtype, (32, x[-1])), y) is None, reason


def project_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Beside rows of other memory, to see what is written there."""
    heads, outputs, inputs = weight.shape
    size = packed_weights.PackedSize.of_heads(Meta.of(weight.dtype, tuple(weight.shape)))
    packed = packed_weights.packed(size, lambda: [packed_weights.plain_rows([own], None) for own in weight])
    y = torch.full((len(x) + 1, heads * outputs + 3), 7.0, dtype=x.dtype)
    kind, words = TYPES[x.dtype], inputs * x.element_size() // 4
    work = Product(kind, kind, words, outputs, packed_weights.isa(), heads=heads)
    strides = [t.stride(0) * t.element_size() for t in (x, y)]
    places = [t.data_ptr() for t in (x, packed, y)]
    Chain([(work, [0, 1, 2])], 3, []).run(len(x), torch.get_num_threads(), places, [strides[0], 0, strides[1]])
    assert (y[-1] == 7).all() and (y[:, heads * outputs :] == 7).all()
    return y[:-1, : heads * outputs]


@pytest.mark.parametrize("isa", OWN_GEMMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_by_weights_of_their_own(use, threads, isa, dtype):
    """A row has the same bits whatever it is beside."""
    use(isa)
    for heads, inputs, outputs in ((1, 64, 32), (3, 8, 20), (5, 128, 96), (4, 34, 33)):
        x, weight = numbers(dtype, 57, heads * inputs), numbers(dtype, heads, outputs, inputs, seed=1)
        wanted = torch.einsum("nhi,hoi->nho", x.double().view(-1, heads, inputs), weight.double()).flatten(1)
        made = project_heads(x, weight)
        assert (made - wanted).abs().max() < (2e-5 if dtype == torch.float32 else 0.02) * wanted.abs().max()
        for rows in (1, 2, 15, 31):
            assert torch.equal(project_heads(x[:rows], weight), made[:rows])
    with pytest.raises(ValueError, match="one head for a gate"):
        Product(TYPES[dtype], TYPES[dtype], 4, 32, isa, gate=Op.silu, heads=2)
