"""Weights of 16-bit checkpoints stay in 16 bits where activations are float32, and multiply to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcdecode._ops_cpu import Op, WeightForm
from hpcdecode.model import load_split
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.few_bits import ALL_FORMS
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.packed_products import multiply
from tests.support.steps import Attention, step

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS = [(0, place, 7 * place % 500 + 2) for place in range(9)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_products_are_those_of_float32_weights_to_the_bit(monkeypatch, isa, name):
    """For any number of rows, so that a row does not depend on those beside it."""
    use_isa(monkeypatch, isa)
    native = ALL_FORMS[name].native
    for inputs, outputs in ((32, 32), (96, 70), (544, 47), (288, 160)):
        weight, bias = numbers(outputs, inputs).to(HALVES[name]), numbers(outputs, seed=1)
        parts = weight.float().tensor_split([outputs // 3])
        packed = packed_weights.pack_few_bits(name, parts, bias)
        plain = packed_weights.pack(parts, bias)
        assert packed.nbytes < 0.55 * plain.nbytes
        x = numbers(130, inputs, seed=2)
        together = multiply(x, plain, outputs, WeightForm.plain)
        assert torch.equal(multiply(x, packed, outputs, native), together)
        for rows in (*range(1, 17), 28, 29, 57):
            some = multiply(x[rows : 2 * rows], packed, outputs, native)
            assert torch.equal(some, together[rows : 2 * rows])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_gates_take_them(monkeypatch, isa, name):
    use_isa(monkeypatch, isa)
    one, other = (numbers(48, 64, seed=i).to(HALVES[name]).float() for i in (0, 1))
    biases = [numbers(48, seed=i) for i in (2, 3)]
    size = packed_weights.PackedSize(96, ALL_FORMS[name].words(64), 1)
    packed = packed_weights.packed(size, lambda: [packed_weights.gated_rows(one, other, biases)], bits=name)
    plain = packed_weights.pack_gated(one, other, biases)
    for count in (1, 5, 14, 15, 60):
        x = numbers(count, 64, seed=4)
        gated = multiply(x, packed, 48, ALL_FORMS[name].native, Op.silu)
        assert torch.equal(gated, multiply(x, plain, 48, WeightForm.plain, Op.silu))


def stored_as(dtype: torch.dtype, folder: Path, to: Path) -> Path:
    """A copy of a checkpoint with its weights stored in a dtype."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return to


@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_numbers_of_float16_at_the_ends(monkeypatch, isa):
    """Tiny ones, the largest, infinity and NaN."""
    use_isa(monkeypatch, isa)
    weight = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).reshape(-1, 32)
    packed = packed_weights.pack_few_bits("float16", [weight.float()])
    held = multiply(torch.eye(32), packed, len(weight), ALL_FORMS["float16"].native).t()
    finite = torch.isfinite(weight).all(1)
    assert torch.equal(held[finite], weight[finite].float()) and not torch.isfinite(held[~finite]).any(1).all()
    one = torch.full((32, 32), 1.0)
    one[0, 0], one[1, 1], one[2, 2] = torch.inf, -torch.inf, torch.nan
    packed = packed_weights.pack_few_bits("float16", [one])
    found = multiply(torch.ones(1, 32), packed, 32, ALL_FORMS["float16"].native)[0]
    assert found[0] == torch.inf and found[1] == -torch.inf and found[2].isnan() and (found[3:] == 32).all()


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2", "gemma2", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_model_keeps_them_and_its_logits(checkpoint, tmp_path, name, stored):
    """Merged, gated, with biases, transposed, of experts."""
    if not packed_weights.packs(torch.float32, "bfloat16"):
        pytest.skip("this machine has no such GEMMs")
    folder = stored_as(HALVES[stored], checkpoint(name), tmp_path / name)
    plain, model = (load_split(folder, dtype="float32", quantised=q) for q in (None, "auto"))
    recipes = [r for s in model._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed]
    assert stored in {r.bits for r in recipes}
    logits = [step(m, Attention(m), TOKENS, [3, 8]) for m in (plain, model)]
    assert torch.equal(*logits)
    assert weight_bytes(folder, torch.float32, "auto") < weight_bytes(folder, torch.float32)


def test_weights_that_are_not_bfloat16_or_have_activations_of_it_stay_as_they_are(checkpoint, tmp_path):
    whole = load_split(checkpoint("llama3"), dtype="float32", quantised="auto")
    narrow = load_split(
        stored_as(torch.bfloat16, checkpoint("llama3"), tmp_path / "narrow"), dtype="bfloat16", quantised="auto"
    )
    for model in (whole, narrow):
        recipes = [r for s in model._slices.values() for t in s.stretches for r in t.compiled.recipes]
        assert {r.bits for r in recipes} == {None}


def test_what_is_not_quantised_keeps_them(checkpoint, tmp_path):
    """The LM head under `--weights int4`: the logits are those of the same weights stored as float32."""
    if not packed_weights.packs(torch.float32, "bfloat16"):
        pytest.skip("this machine has no such GEMMs")
    narrow = stored_as(torch.bfloat16, checkpoint("llama3"), tmp_path / "narrow")
    wide = stored_as(torch.float32, narrow, tmp_path / "wide")
    models = [load_split(folder, dtype="float32", quantised="int4") for folder in (narrow, wide)]
    forms = [
        {r.bits for s in m._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed}
        for m in models
    ]
    assert forms == [{"int4", "bfloat16"}, {"int4", None}]
    assert torch.equal(*(step(m, Attention(m), TOKENS, [3, 8]) for m in models))
