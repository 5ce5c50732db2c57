"""Layers of experts: rows by the weights of their experts, with the same bits alone and in company."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from hpcdecode._ops_cpu import ExpertProduct, Op, Product
from hpcdecode.model import load_split
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.experts import ExpertGemm
from hpcdecode.model.lower.few_bits import FORMS
from hpcdecode.model.lower.instruction import TYPES
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.steps import Attention, step

pytestmark = pytest.mark.usefixtures("all_cores")

DTYPES = (torch.float32, torch.bfloat16)
GATES = {Op.silu: functional.silu, Op.gelu_tanh: partial(functional.gelu, approximate="tanh")}
TOKENS = [(row, place, (17 * place + row) % 500 + 2) for row in range(3) for place in range(7)]


@pytest.fixture
def use(monkeypatch):
    return partial(use_isa, monkeypatch)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_each_row_is_multiplied_by_the_weight_of_its_own_expert(transposed, shared):
    weight, bias, expert = numbers(torch.float32, 5, 6, 4), numbers(torch.float32, 5, 6), torch.tensor([[0, 3], [4, 4]])
    x = numbers(torch.float32, 2, 1 if shared else 2, 4)
    got = expert_linear(x, expert, weight.mT.contiguous() if transposed else weight, bias, transposed)
    want = torch.einsum("tkoi,tki->tko", weight[expert], x.expand(2, 2, 4)) + bias[expert]
    torch.testing.assert_close(got, want)
    pieces = [(w[:2].clone(), w[2:].clone()) for w in weight]
    torch.testing.assert_close(expert_linear(x, expert, pieces, bias, False), want)
    assert expert_linear(x[:0], expert[:0], pieces, None, False).shape == (0, 2, 6)


class Case:
    """A layer of experts in random numbers, some of whose rows are of experts without weights here."""

    def __init__(self, dtype, experts, inputs, outputs, gate=None, first=0, bits=None):
        self.dtype, self.gate, self.first = dtype, gate, first
        self.weight = numbers(dtype, experts, outputs, inputs, seed=1) / inputs**0.5
        self.bias = numbers(dtype, experts, outputs, seed=2)
        columns = outputs if gate is None else outputs // 2
        weight, y = Meta.of(dtype, tuple(self.weight.shape)), Meta.of(dtype, ("T", 4, columns))
        self.gemms = {n: ExpertGemm(Meta.of(dtype, ("T", n, inputs)), weight, y, first, gate, bits) for n in (1, 4)}
        self.packed = packed_weights.packed(self.gemms[1].packed, self.rows, bits=bits)

    def gemm(self, x, experts, weight) -> torch.Tensor:
        return self.gemms[x.shape[1]](x, experts, weight)

    def rows(self):
        for weight, bias in zip(self.weight, self.bias, strict=True):
            if self.gate is None:
                yield packed_weights.plain_rows([weight], bias)
            else:
                yield packed_weights.gated_rows(*weight.chunk(2), bias.chunk(2))

    def drawn(self, tokens: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        experts = torch.randint(len(self.weight) + self.first + 2, (tokens, 4), generator=torch.manual_seed(tokens))
        return numbers(self.dtype, tokens, 1 if shared else 4, self.weight.shape[2], seed=3), experts

    def exact(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        y = expert_linear(x.double(), experts, self.weight.double(), self.bias.double(), False, self.first)
        if self.gate is None:
            return y
        one, other = y.chunk(2, -1)
        return GATES[self.gate](one) * other


@pytest.mark.parametrize("isa", OWN_GEMMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [None, *GATES])
def test_products_are_right_and_a_row_has_the_same_bits_in_any_company(use, threads, isa, dtype, gate):
    use(isa)
    for experts, inputs, outputs, first in ((3, 34, 64, 0), (16, 96, 96, 5), (1, 64, 160, 0)):
        case = Case(dtype, experts, inputs, outputs + (0 if gate else 7), gate, first)
        for tokens, shared in ((1, True), (9, False), (150, True)):
            x, chosen = case.drawn(tokens, shared)
            y, wanted = case.gemm(x, chosen, case.packed), case.exact(x, chosen)
            assert (y - wanted).abs().max() <= (2e-5 if dtype == torch.float32 else 0.03) * wanted.abs().max()
            others = (chosen < first) | (chosen >= first + experts)
            assert others.any() or tokens == 1
            assert not y[others].any()
            alone = [case.gemm(x[i : i + 1], chosen[i : i + 1], case.packed) for i in range(tokens)]
            assert torch.equal(torch.cat(alone), y)
            assert torch.equal(case.gemm(x.flip(0), chosen.flip(0), case.packed).flip(0), y)
    assert case.gemm(x[:0], chosen[:0], case.packed).shape == (0, 4, y.shape[2])


@pytest.mark.parametrize("isa", OWN_GEMMS)
@pytest.mark.parametrize("bits", FORMS)
def test_weights_in_few_bits_have_the_results_of_the_numbers_that_they_stand_for(use, isa, bits):
    """Those are found by the identity."""
    use(isa)
    case = Case(torch.float32, 4, 64, 96, bits=bits)
    every = torch.arange(4).expand(64, 4)
    held = case.gemm(torch.eye(64)[:, None], every, case.packed).permute(1, 2, 0) - case.bias[:, :, None]
    assert 0 < (held - case.weight).abs().max() < 0.3 * case.weight.abs().max()
    case.weight = held.contiguous()
    for tokens in (1, 30, 200):
        x, chosen = case.drawn(tokens, shared=False)
        torch.testing.assert_close(case.gemm(x, chosen, case.packed), case.exact(x, chosen).float(), rtol=0, atol=1e-4)
        alone = [case.gemm(x[i : i + 1], chosen[i : i + 1], case.packed) for i in range(tokens)]
        assert torch.equal(torch.cat(alone), case.gemm(x, chosen, case.packed))


def test_what_makes_no_product_is_refused():
    kind, isa = TYPES[torch.float32], packed_weights.isa()
    with pytest.raises(ValueError, match="expected one head"):
        ExpertProduct(Product(kind, kind, 8, 32, isa, heads=2), 4, 0, 2, True)
    with pytest.raises(ValueError, match="expected experts"):
        ExpertProduct(Product(kind, kind, 8, 32, isa), 0, 0, 2, True)
    with pytest.raises(ValueError, match="expected a choice for every token"):
        ExpertProduct(Product(kind, kind, 8, 32, isa), 4, 0, 0, True)


def bound(model) -> dict[str, set[str | None]]:
    """The forms of a model's weights, each with its bits; and no weight of experts is left as it was."""
    stretches = [stretch for one in model._slices.values() for stretch in one.stretches]
    assert not any(isinstance(weight, Stack) for stretch in stretches for weight in stretch.weights)
    found: dict[str, set[str | None]] = {}
    for recipe in (recipe for stretch in stretches for recipe in stretch.compiled.recipes):
        found.setdefault(recipe.form, set()).add(recipe.bits)
    return found


def logits(model, tokens=TOKENS) -> torch.Tensor:
    return step(model, Attention(model), tokens, list(range(len(tokens))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_a_row_of_a_model_has_the_same_bits_alone(checkpoint, name, dtype):
    """Stacks and single tensors, gated in the product or after it, with biases and transposed."""
    model = load_split(checkpoint(name), dtype=dtype)
    forms = bound(model)
    assert "packed experts" in forms and ("packed gated experts" in forms) == (name != "gpt_oss")
    together = logits(model)
    for row in range(3):
        alone = logits(model, [token for token in TOKENS if token[0] == row])
        assert torch.equal(alone, together[7 * row : 7 * row + 7])


@pytest.mark.parametrize("bits", [*FORMS, "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_of_a_model_are_quantised(checkpoint, name, bits):
    if bits == "int8" and not quantize.exact():
        pytest.skip("this CPU has no exact int8 products")
    plain, model = (load_split(checkpoint(name), dtype="bfloat16", quantised=q) for q in (None, bits))
    forms = bound(model)
    if bits != "int8":
        assert forms["packed experts"] == {bits}
    elif name == "gpt_oss":  # experts with biases stay as they are
        assert forms["packed experts"] == {None} and "packed int8 experts" not in forms
    else:
        assert forms["packed int8 experts"] == {None} and not {"packed experts", "packed gated experts"} & forms.keys()
    a, b = (logits(m).float() for m in (plain, model))
    assert 0 < (a - b).abs().median() < (0.1 if bits == "int8" else 0.4) * a.std()  # some rows choose other experts
    alone = logits(model, TOKENS[:7])
    assert torch.equal(alone.float(), b[:7])
