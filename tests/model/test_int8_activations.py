"""`--activations int8`: rows are rounded by a scale for 32 numbers, and multiplied by weights in few bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode._attn_cpu import supported_isas
from hpcdecode._ops_cpu import Op
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.few_bits import ALL_FORMS, BY_INT8
from hpcdecode.model.run.load import require_int8_activations
from tests.support.blocks import random_weight
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.packed_products import multiply
from tests.support.steps import Attention, step

DTYPES = (torch.float32, torch.bfloat16)
FORMS = tuple(BY_INT8)
INPUTS, OUTPUTS = 768, 70
GROUP = 32
TOKENS = [(0, place, 7 * place % 500 + 2) for place in range(9)]


@pytest.fixture
def use(monkeypatch):
    return partial(use_isa, monkeypatch)


def rows(count: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Rows with outliers, as activations have them."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    x[:, 5] *= 100
    return x.to(dtype)


def weight(form: str, bias: torch.Tensor | None = None, outputs: int = OUTPUTS) -> torch.Tensor:
    """A packed weight."""
    if form in BLOCKS:
        return packed_weights.pack_few_bits(form, [random_weight(form, outputs, INPUTS)], bias)
    numbers = torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.05
    return packed_weights.pack_few_bits(form, [numbers], bias)


def multiplied(form: str, x: torch.Tensor, packed: torch.Tensor, outputs: int = OUTPUTS, gate: Op | None = None):
    return multiply(x, packed, outputs, ALL_FORMS[form].native, gate, rounded=True)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as they are multiplied, in float64."""
    groups = x.float().unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2, keepdim=True)
    return ((groups * (torch.full_like(most, 127) / most)).round().double() * (most / 127)).flatten(1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_products_are_those_of_rounded_rows(use, isa, dtype, form):
    use(isa)
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(2))
    packed, x = weight(form, bias), rows(130, dtype)
    numbers = multiply(torch.eye(INPUTS), weight(form), OUTPUTS, ALL_FORMS[form].native).double()
    want, found = rounded(x) @ numbers + bias, multiplied(form, x, packed)
    torch.testing.assert_close(found, want.to(dtype), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=2e-4)
    exact = multiply(x, packed, OUTPUTS, ALL_FORMS[form].native)
    assert 0.001 < (found - exact).float().norm() / exact.float().norm() < 0.02


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_a_row_has_the_same_bits_in_any_company(use, isa, dtype, form):
    use(isa)
    packed, x = weight(form), rows(130, dtype)
    together = multiplied(form, x, packed)
    for count in (*range(1, 22), 28, 29, 57):
        assert torch.equal(multiplied(form, x[count : 2 * count], packed), together[count : 2 * count])


@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_give_the_same_bits(monkeypatch, form):
    """Sums of bytes are exact, and sums of float32 run in one order."""
    packed, x, made = weight(form), rows(40, torch.float32), []
    for isa in set(OWN_GEMMS).intersection(supported_isas()):
        monkeypatch.setenv("HPCDECODE_ISA", isa)
        made.append(multiplied(form, x, packed))
    assert made and all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_gates_take_rounded_rows(use, isa, dtype, form):
    use(isa)
    one, other = (torch.randn(48, INPUTS, generator=torch.Generator().manual_seed(i)) * 0.05 for i in (0, 1))
    size = packed_weights.PackedSize(96, ALL_FORMS[form].words(INPUTS), 1)
    gated = packed_weights.packed(size, lambda: [packed_weights.gated_rows(one, other, ())], bits=form)
    apart = [packed_weights.pack_few_bits(form, [w]) for w in (one, other)]
    for count in (1, 5, 60):
        x = rows(count, dtype)
        a, b = (multiplied(form, x, w, 48).float() for w in apart)
        want = (torch.nn.functional.silu(a).to(dtype) * b.to(dtype)).to(dtype)
        found = multiplied(form, x, gated, 48, Op.silu)
        torch.testing.assert_close(found, want, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_numbers_at_the_ends(use, isa, form):
    """What is not finite stays so; zeros and tiny numbers give zeros; the largest numbers are rounded as others are."""
    use(isa)
    x, packed = rows(9, torch.float32), weight(form)
    x[1, 40], x[2, 40], x[3, 40] = torch.nan, torch.inf, -torch.inf
    x[4], x[5], x[6], x[7] = 0.0, 1e-38, 3e38 * (torch.arange(INPUTS) == 3), -7.0
    found = multiplied(form, x, packed)
    assert not torch.isfinite(found[1:4]).any()
    assert (found[4:6] == 0).all()
    numbers = multiply(torch.eye(INPUTS), packed, OUTPUTS, ALL_FORMS[form].native)
    torch.testing.assert_close(found[6], 3e38 * numbers[3], rtol=1e-4, atol=1e33)
    torch.testing.assert_close(found[7], -7 * numbers.double().sum(0).float(), rtol=1e-3, atol=1e-3)
    for row in (0, 8):
        assert torch.equal(found[row], multiplied(form, x[row : row + 1], packed)[0])


@pytest.mark.parametrize("name", ["llama3", "gpt2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_of_all_kinds_of_projections(checkpoint, name, dtype):
    """Merged, gated, transposed, with biases, of experts."""
    plain, model = (
        load_split(checkpoint(name), dtype=dtype, quantised="int4", int8_activations=b) for b in (False, True)
    )
    made = {r.bits for s in model._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed}
    assert BY_INT8["int4"] in made <= {BY_INT8["int4"], None}
    a, b = (step(m, Attention(m), TOKENS, [8]).float() for m in (plain, model))
    assert 0 < (a - b).square().mean().sqrt() < 0.2 * a.std()


def test_a_model_without_such_weights_is_said(checkpoint, caplog):
    with caplog.at_level("WARNING"):
        model = load_split(checkpoint("llama3"), dtype="float32", int8_activations=True, announce=True)
    assert not model.rounds_activations and "no weights in few bits here (but FP8), so it does nothing" in caplog.text


def test_texts_do_not_depend_on_the_batch():
    prompts = [f"The {word} statement" for word in ("with", "if", "for", "while", "try", "import", "return")]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)

    def texts(batch: int) -> list[object]:
        llm = LLM("demo", weights="int4", activations="int8", batch=batch)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        return [(o.token_ids, o.cumulative_logprob) for o in outputs]

    assert texts(1) == texts(5)


def test_what_has_no_such_products(monkeypatch):
    with pytest.raises(UserError, match=r"--activations int8: expected S-ranks on CPUs with AVX2 or AVX-512.*got cuda"):
        require_int8_activations(torch.device("cuda"), torch.bfloat16)
    with pytest.raises(UserError, match=r"--activations int8.*got .* and float16; leave it out"):
        require_int8_activations(torch.device("cpu"), torch.float16)
    monkeypatch.setenv("HPCDECODE_ISA", "generic")
    with pytest.raises(UserError, match=r"--activations int8: .* got generic"):
        require_int8_activations(torch.device("cpu"), torch.float32)
