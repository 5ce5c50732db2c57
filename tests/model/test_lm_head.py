"""The argmax of logits found without most of them, against a search of all of them."""

from __future__ import annotations

import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode._ops_cpu import Argmax, Chain, Product, Type
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.stage import TokenRows
from hpcdecode.model.run import lm_head as head
from hpcdecode.model.run.bound_slice import alone
from hpcdecode.model.run.head_input import LmHeadInput
from hpcdecode.model.run.lm_head import Largest, LmHead
from tests.support.isas import use_isa

pytestmark = pytest.mark.usefixtures("all_cores")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=["avx512_bf16", "amx"])
def small_heads(monkeypatch, request):
    use_isa(monkeypatch, request.param)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Searched:
    """A weight as an LmHead, and as a product whose results are searched."""

    def __init__(self, weight: torch.Tensor):
        self.outputs, inputs = weight.shape
        self.packed, self.kind = packed_weights.pack([weight]), TYPES[weight.dtype]
        x, y = Meta.of(weight.dtype, ("L", inputs)), Meta.of(weight.dtype, ("L", self.outputs))
        self.head = LmHead(TokenRows(x), TokenRows(y), self.packed)
        assert torch.equal(self.packed, packed_weights.pack([weight]))  # it was only read

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), self.outputs, dtype=x.dtype)
        work = Product(self.kind, self.kind, x.shape[1] * x.element_size() // 4, self.outputs, packed_weights.isa())
        places = [t.data_ptr() for t in (x, self.packed, y)]
        steps = [x.stride(0) * x.element_size(), 0, y.stride(0) * y.element_size()]
        Chain([(work, [0, 1, 2])], 3, []).run(len(x), torch.get_num_threads(), places, steps)
        return y

    def check(self, x: torch.Tensor) -> None:
        logits, found = self.logits(x), self.head.largest(x)
        assert found.ids.tolist() == logits.argmax(1).tolist()
        assert found.values.tolist() == logits.max(1).values.tolist()


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (1024, 4099), (260, 1000), (516, 31), (8192, 70)])
def test_the_largest_output_of_any_number_of_rows(dtype, inputs, outputs, threads):
    searched = Searched(numbers(dtype, outputs, inputs) * inputs**-0.5)
    for rows in (1, 2, 13, 14, 15, 29, 130):
        searched.check(numbers(dtype, rows, inputs, seed=rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e12])
def test_numbers_of_any_size(dtype, size, threads):
    searched = Searched(numbers(dtype, 777, 128))
    searched.check(numbers(dtype, 30, 128, seed=1) * size)
    Searched(numbers(dtype, 777, 128) * size).check(numbers(dtype, 30, 128, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_outputs_alike_the_first(dtype, threads):
    weight = numbers(dtype, 200, 64).repeat(3, 1)
    searched = Searched(weight)
    x = numbers(dtype, 40, 64, seed=1)
    searched.check(x)
    assert searched.head.largest(x).ids.max() < 200
    assert searched.head.largest(torch.zeros(3, 64, dtype=dtype)).ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_that_differ_by_less_than_their_last_bit(dtype, threads):
    """Rounded to bfloat16, many are alike; neither order nor rounding may choose another."""
    base = numbers(dtype, 1, 256)
    weight = base + numbers(dtype, 900, 256, seed=1) * 2e-3
    searched = Searched(weight.to(dtype))
    x = base * torch.linspace(-2, 2, 23)[:, None] + numbers(dtype, 23, 256, seed=2) * 1e-2
    searched.check(x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_and_rows_whose_outputs_are_all_negative(dtype, threads):
    weight = numbers(dtype, 1500, 128).abs() * -1
    x = numbers(dtype, 31, 128, seed=1).abs()
    x[:, 7] *= 60
    x[::2, 90] *= -500
    weight[::11, 90] *= 40
    Searched(weight).check(x)


def test_the_bound_holds_for_every_output():
    """What a screening rests on, in float64."""
    weight, x = numbers(torch.bfloat16, 512, 256), numbers(torch.bfloat16, 40, 256, seed=1)
    x[3, 5], weight[100, 9] = 50, -30
    searched = Searched(weight)
    norms = searched.head.norms.double().movedim(1, 0).flatten(1)
    scale, rounded = head.quantize.token_scale(x), head.quantize.to_int8(x, head.quantize.token_scale(x))
    scales = head.quantize.output_scales(weight)
    of_weight = head.quantize.rounded(weight, scales).double() * scales[:, None].double()
    kept = rounded.double() * scale.double()
    lost = x.double() - kept
    bound = lost.norm(dim=1)[:, None] * norms[0] + kept.norm(dim=1)[:, None] * norms[1]
    off = (x.double() @ weight.double().t() - kept @ of_weight.t()).abs()
    assert (off <= bound).all() and off.max() > 0.05 * bound.min()


def test_where_too_many_are_left_all_are_computed_for_a_while():
    weight = (torch.ones(2000, 64) + numbers(torch.float32, 2000, 64) * 1e-4).bfloat16()
    searched, x = Searched(weight), torch.ones(5, 64, dtype=torch.bfloat16)
    searched.check(x)
    assert [searched.head.pauses() for _ in range(head.PAUSE + 1)] == [True] * head.PAUSE + [False]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
def test_numbers_that_have_no_bound_are_left_to_a_search(number):
    x, weight = numbers(torch.bfloat16, 3, 64), numbers(torch.bfloat16, 64, 64)
    searched = Searched(weight)
    x[1, 1] = number
    assert searched.head.largest(x) is None
    weight[5, 6] = number
    assert Searched(weight).head.pauses()


def ends(model: SplitModel, tokens: int, kept: list[int]) -> tuple:
    """What the last slice takes, after attentions of random numbers."""
    ids = torch.arange(5, 5 + tokens)
    o, context = None, (ids, ids, torch.tensor(kept))
    for i, shape in enumerate(model.attends):
        *_, context = model.slice(i, o, context)
        o = numbers(model.dtype, tokens, shape.out_columns, seed=i)
    return o, context


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3", "qwen2", "gpt2", "mixtral"])
def test_of_a_model_the_kept_tokens_largest(checkpoint, name, dtype, threads):
    model = load_split(checkpoint(name), dtype=dtype)
    for kept in ([0], [3, 17, 39], list(range(40))):
        logits = model.logits(*ends(model, 40, kept))
        found = alone(model.start_last(*ends(model, 40, kept))).largest()
        assert found.ids.tolist() == logits.argmax(1).tolist() == Largest.of(logits).ids.tolist()
        assert found.values.tolist() == logits.max(1).values.tolist() == Largest.of(logits).values.tolist()


def test_models_whose_logits_are_no_plain_product_are_searched(checkpoint, monkeypatch):
    assert load_split(checkpoint("gemma2"), dtype="bfloat16").head is None  # tanh of them
    assert load_split(checkpoint("llama3"), dtype="bfloat16", quantised="int8").head is None
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1 << 20)
    assert load_split(checkpoint("llama3"), dtype="bfloat16").head is None


def test_rows_that_ask_for_their_largest_logit_alone_get_the_same_tokens(checkpoint, monkeypatch):
    prompts = [{"prompt_token_ids": [5 + i * 7 % 400] * (1 + i % 9)} for i in range(20)]
    llm = LLM(checkpoint("llama3"), dtype="bfloat16", batch=8, kv_memory="16M", threads=2)

    def made(**asked) -> list:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, **asked), use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]

    calls = []
    plain = LmHeadInput.logits
    monkeypatch.setattr(LmHeadInput, "logits", lambda *of: calls.append(of) or plain(*of))
    found = made()
    assert not calls
    assert made(logprobs=1) == made(min_tokens=1, ignore_eos=False) == found and calls


def test_what_has_no_screening_is_refused():
    assert not Argmax.offered(Type.bfloat16, Type.bfloat16, "generic")
    assert not Argmax.offered(Type.int8, Type.float32, "avx512_bf16")
    with pytest.raises(ValueError, match="product: generic has none of these types"):
        Argmax(Type.bfloat16, Type.bfloat16, 64, 64, "generic")
    with pytest.raises(ValueError, match="argmax: avx512_bf16 has none of these types"):
        Argmax(Type.int8, Type.float32, 64, 64, "avx512_bf16")
    with pytest.raises(ValueError, match="expected whole int8 words"):
        Argmax(Type.bfloat16, Type.bfloat16, 63, 64, "avx512_bf16")
