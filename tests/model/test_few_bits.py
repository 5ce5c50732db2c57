"""Weights in few bits: rounded to the nearest code, and multiplied bit for bit as the same weights expanded."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode._ops_cpu import Op, Product
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.few_bits import ALL_FORMS, FORMS
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.run.load import require_quantised
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.packed_products import multiply
from tests.support.steps import Attention, step

DTYPES = (torch.bfloat16, torch.float32)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
STEPS = {"mxfp4": 0.25, "mxfp8": 1 / 16}  # between a power of two's numbers, over the smaller
TOKENS = [(0, place, 7 * place % 500 + 2) for place in range(9)]


@pytest.fixture
def use(monkeypatch):
    return partial(use_isa, monkeypatch)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [out, groups, group], with zeros behind the end."""
    return torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))


def rounded_int4(w: torch.Tensor) -> torch.Tensor:
    low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
    scale = torch.maximum((high - low) / 15, torch.maximum(low.abs(), high.abs()) / 1024).half().float()
    by = torch.where(scale == 0, 1, scale)
    zero = (-low / by).half().float()
    return scale * (w / by + zero).round().clamp(0, 15) - scale * zero


def rounded_mxfp4(w: torch.Tensor) -> torch.Tensor:
    _, exponent = torch.frexp(w.abs().amax(2, keepdim=True))
    tries = []
    for more in (3, 2):
        scale = 2.0 ** (exponent - more).clamp(-125, 125)
        codes = torch.bucketize((w.abs() / scale).contiguous(), (E2M1[1:] + E2M1[:-1]) / 2)
        tries.append(E2M1[codes] * scale * w.sign())
    one, two = tries
    better = (two - w).square().sum(2, keepdim=True) < (one - w).square().sum(2, keepdim=True)
    return torch.where(better, two, one)


def rounded_fp8(w: torch.Tensor) -> torch.Tensor:
    scale = w.abs().amax(2, keepdim=True) / 448
    by = torch.where(scale == 0, 1, scale)
    return (w / by).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def rounded_mxfp8(w: torch.Tensor) -> torch.Tensor:
    """With the least power of two by which FP8 holds the largest number to the nearest."""
    fraction, exponent = torch.frexp(w.abs().amax(2, keepdim=True))
    scale = 2.0 ** (exponent - 9 + (fraction > 464 / 512).int()).clamp(10 - 127, 134 - 127)
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def expanded(bits: str, weight: torch.Tensor) -> torch.Tensor:
    """The float32 numbers that a weight becomes in a form."""
    rounded = {"int4": rounded_int4, "mxfp4": rounded_mxfp4, "mxfp8": rounded_mxfp8, "fp8": rounded_fp8}[bits]
    return rounded(grouped(weight, FORMS[bits].group)).flatten(1)[:, : weight.shape[1]]


def held(bits: str, weight: torch.Tensor) -> torch.Tensor:
    """The numbers that a packed weight stands for: its products with the rows of the identity."""
    packed = packed_weights.pack_few_bits(bits, [weight])
    return multiply(torch.eye(weight.shape[1], dtype=weight.dtype), packed, len(weight), ALL_FORMS[bits].native).t()


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_products_are_those_of_the_expanded_weights_to_the_bit(use, isa, dtype, bits):
    """For any number of rows, so that a row does not depend on those beside it."""
    use(isa)
    for inputs, outputs in ((32, 32), (96, 70), (544, 47), (288, 160)):
        weight, bias = numbers(outputs, inputs).bfloat16(), numbers(outputs, seed=1)
        parts = weight.tensor_split([outputs // 3])
        packed = packed_weights.pack_few_bits(bits, parts, bias)
        plain = packed_weights.pack([expanded(bits, weight).to(dtype)], bias)
        x = numbers(130, inputs, seed=2).to(dtype)
        together = multiply(x, plain, outputs)
        assert torch.equal(multiply(x, packed, outputs, FORMS[bits].native), together)
        for rows in (*range(1, 22), 28, 29, 57):
            some = multiply(x[rows : 2 * rows], packed, outputs, FORMS[bits].native)
            assert torch.equal(some, together[rows : 2 * rows])


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_gates_take_weights_in_few_bits(use, isa, dtype, bits):
    use(isa)
    one, other, biases = numbers(48, 64), numbers(48, 64, seed=1), [numbers(48, seed=i) for i in (2, 3)]
    size = packed_weights.PackedSize(96, FORMS[bits].words(64), 1)
    rows = packed_weights.gated_rows(one, other, biases)
    packed = packed_weights.packed(size, lambda: [rows], bits=bits)
    plain = packed_weights.pack_gated(*(expanded(bits, w).to(dtype) for w in (one, other)), biases)
    for count in (1, 5, 20, 21, 60):
        x = numbers(count, 64, seed=4).to(dtype)
        gate = partial(multiply, x, outputs=48, gate=Op.silu)
        assert torch.equal(gate(packed=packed, form=FORMS[bits].native), gate(packed=plain))


@pytest.mark.parametrize(("bits", "most"), [("int4", 1 / 30), ("mxfp4", 1 / 4), ("mxfp8", 1 / 16), ("fp8", 1 / 28)])
def test_rounding_is_to_the_nearest_code(bits, most):
    """By at most half a step, as a share of the range of a group; MXFP4 may cut off a quarter of the largest number."""
    weight = numbers(64, 256)
    groups = [grouped(w, FORMS[bits].group) for w in (weight, held(bits, weight))]
    span = groups[0].amax(2) - groups[0].amin(2) if bits == "int4" else groups[0].abs().amax(2)
    assert ((groups[0] - groups[1]).abs().amax(2) <= (most + 0.002) * span).all()
    assert not torch.equal(*groups)


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-6, 2.0**-125, 1e4])
def test_equal_numbers_and_zeros(bits, value):
    weight = torch.full((32, 256), value)
    assert torch.isfinite(held(bits, weight)).all()
    least = {"int4": 1e-3, "mxfp4": 2.0**-125, "mxfp8": 1e-6, "fp8": 1e-6}[bits]
    if value == 0 or abs(value) >= least:
        torch.testing.assert_close(held(bits, weight), weight, rtol=STEPS.get(bits, 2e-3), atol=0)


def mxfp4_numbers(generator: torch.Generator) -> torch.Tensor:
    codes = torch.randint(0, 16, (64, 256), generator=generator)
    exponents = torch.randint(-12, 3, (64, 8), generator=generator).repeat_interleave(32, 1)
    return torch.ldexp(E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0), exponents)


def int4_numbers(generator: torch.Generator) -> torch.Tensor:
    codes = torch.randint(0, 16, (64, 256), generator=generator)
    zeros = torch.randint(0, 17, (64, 2), generator=generator).repeat_interleave(128, 1)
    scales = torch.rand(64, 2, generator=generator).add(0.01).half().float().repeat_interleave(128, 1)
    return (codes - zeros) * scales


def mxfp8_numbers(generator: torch.Generator) -> torch.Tensor:
    """Of all codes, among them groups with large numbers alone and with small ones, which are subnormal."""
    codes = torch.arange(256).repeat(64).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448)
    sizes = codes.abs().view(torch.int32)
    mixed = codes[torch.randperm(len(codes), generator=generator)]
    exponents = torch.randint(-14, 3, (64, 8), generator=generator).repeat_interleave(32, 1)
    return torch.ldexp(torch.cat([codes[sizes.argsort()][: 32 * 256], mixed[: 32 * 256]]).view(64, 256), exponents)


def fp8_numbers(generator: torch.Generator) -> torch.Tensor:
    codes = torch.randn(64, 256, generator=generator).to(torch.float8_e4m3fn).float()
    return codes * torch.rand(64, 2, generator=generator).add(0.01).repeat_interleave(128, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "numbers"),
    [("mxfp4", mxfp4_numbers), ("mxfp8", mxfp8_numbers)],
)
def test_numbers_of_a_form_stay_what_they_are(bits, numbers, dtype):
    weight = numbers(torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(held(bits, weight), weight)


@pytest.mark.parametrize("bits", FORMS)
def test_what_has_no_gemm_of_few_bits(monkeypatch, bits):
    x, weight, y = (Meta.of(torch.bfloat16, shape) for shape in (("T", 48), (32, 48), ("T", 32)))
    assert packed_weights.gemm(x, weight, y, bits=bits) is None  # 48 is no multiple of 32
    with pytest.raises(ValueError, match="expected a multiple of 32 inputs"):
        kind = TYPES[torch.float32]
        Product(kind, kind, 48, 32, packed_weights.isa(), None, FORMS[bits].native)
    monkeypatch.setenv("HPCDECODE_ISA", "generic")
    with pytest.raises(UserError, match=f"--weights {bits}: expected a CPU with AVX2"):
        require_quantised(bits, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_projections_are_in_few_bits_and_its_head_is_not(checkpoint, name, dtype, bits):
    """Merged, gated, with biases and transposed."""
    plain, model = (load_split(checkpoint(name), dtype=dtype, quantised=q) for q in (None, bits))
    recipes = [r for s in model._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed]
    (head,) = [r for r in recipes if r.bits is None]
    assert head.packed.outputs == model.vocab_size and {r.bits for r in recipes} == {bits, None}
    a, b = (step(m, Attention(m), TOKENS, [8]).float() for m in (plain, model))
    assert 0 < (a - b).square().mean().sqrt() < 0.5 * a.std()


def test_the_demo_says_the_same_with_fp8_weights():
    prompts, params = ["The with statement", "A class definition"], SamplingParams(max_tokens=40, ignore_eos=True)
    texts = [
        [o.outputs[0].text for o in LLM("demo", weights=weights).generate(prompts, params, use_tqdm=False)]
        for weights in (None, "fp8")
    ]
    assert texts[0] == texts[1]  # the demo knows its text by heart
