"""Weights in blocks, of GGUF files too, stay so under `--weights auto`: the same numbers and results, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers

from hpcdecode._ops_cpu import BlockType, Product, Type, pack_blocks
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, GGUF_BLOCKS, OWN_BLOCKS
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.few_bits import ALL_FORMS
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.blocks import numbers_of, random_weight
from tests.support.gguf_files import KINDS, write
from tests.support.gguf_logits import expanded, multiply
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.models import SHAPE, save
from tests.support.quantised import forms
from tests.support.steps import Attention, step

TOKENS = [(0, place, 7 * place % 500 + 2) for place in range(9)]
DTYPES = (torch.bfloat16, torch.float32)
LARGE = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def logits(path, dtype, **options):
    model = load_split(path, dtype=dtype, **options)
    return step(model, Attention(model), TOKENS, list(range(len(TOKENS))))


def packed_bytes(model):
    recipes = [r for s in model._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed]
    return sum(r.packed.bytes for r in recipes)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OWN_GEMMS)
def test_products_are_those_of_the_dequantised_blocks_to_the_bit(monkeypatch, isa, dtype, name):
    """Of all codes and scales, for any number of rows."""
    use_isa(monkeypatch, isa)
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((70, 512), (32, 256), *(((40, 320),) if name in OWN_BLOCKS else ())):
        blocks, bias = random_weight(name, outputs, inputs), torch.randn(outputs, generator=generator)
        packed = packed_weights.pack_few_bits(name, blocks.tensor_split([outputs // 3]), bias)
        plain = packed_weights.pack([numbers_of(name, blocks).to(dtype)], bias)
        for rows in (1, 2, 7, 14, 33, 130):
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            assert torch.equal(multiply(x, packed, outputs, name), multiply(x, plain, outputs, None))
        bits = 8 * packed.nbytes / (packed.shape[0] * 32 * inputs)
        most = ALL_FORMS[name].bits * (1.25 if inputs % ALL_FORMS[name].group else 1)  # the last scales are for fewer
        assert bits < most + 0.4  # with biases, and scales up to a line of memory


def test_negative_scales_and_the_largest_codes(monkeypatch):
    """Which random blocks that are plausible weights may not have."""
    block = np.zeros((32, 34), np.uint8)
    block[:, :2] = np.array([-0.001], "<f2").view(np.uint8)
    block[:, 2:] = np.arange(128, 160)  # -128 to -97
    want = torch.from_numpy(gguf.quants.dequantize(block, KINDS.Q8_0))
    found = multiply(torch.eye(32), packed_weights.pack_few_bits("Q8_0", [torch.from_numpy(block)]), 32, "Q8_0")
    assert torch.equal(found.t(), want)


@pytest.mark.parametrize(("name", "least", "most"), [("mx4", 2, 252), ("MXFP4", 2, 252), ("mx8", 10, 134)])
def test_exponents_that_a_form_has_not(name, least, most):
    """Numbers are rounded to multiples of the smallest ones; large ones that fit stay what they are."""
    blocks = random_weight(name, 32, 32)
    for exponent in (0, least - 1, most + 1):
        blocks[:, 0] = exponent
        if exponent > most:
            blocks[:, 1:] &= 0x77 if name != "mx8" else 0x37
            blocks[:, 1:] &= 0x55 if name != "mx8" else 0xFF
        want = numbers_of(name, blocks)
        found = multiply(torch.eye(32), packed_weights.pack_few_bits(name, [blocks]), 32, name).t()
        assert (found - want).abs().max() <= (
            0 if exponent > most else 2.0 ** (least - 127 - (9 if name == "mx8" else 1))
        )


def test_rows_of_part_of_a_block_are_refused():
    bias, out = torch.zeros(32), torch.zeros(1 << 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected whole blocks in a row"):
        pack_blocks([[0, 144, 32]], BlockType.q4_k, 128, 32, bias.data_ptr(), out.data_ptr(), 1)
    with pytest.raises(ValueError, match="expected a multiple of 256 inputs"):
        Product(Type.float32, Type.float32, 96, 32, packed_weights.isa(), None, ALL_FORMS["Q4_K"].native)


def kinds_of_q4_k_m(name):
    """As llama.cpp mixes types in Q4_K_M: V and some down projections in Q6_K, the head too."""
    return "Q6_K" if "attn_v" in name or "blk.0.ffn_down" in name or not name.startswith("blk") else "Q4_K"


KINDS_OF = {**{name: (lambda own, name=name: name) for name in GGUF_BLOCKS}, "Q4_K_M": kinds_of_q4_k_m}
HELD = {"Q4_K_M": {"Q4_K", "Q6_K"}}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in KINDS_OF), ("Q4_K_M", "float32")])
def test_a_model_has_the_logits_of_its_dequantised_weights_to_the_bit(tmp_path, name, dtype):
    """Rows of queries and keys are in another order in the file; a tied head is packed, its embedding is not."""
    source = save(transformers.LlamaConfig(**LARGE, tie_word_embeddings=True), tmp_path / "source")
    file = write(source, tmp_path, "llama", KINDS_OF[name]).file
    plain, model = (load_split(file, dtype=dtype, quantised=q) for q in (None, "auto"))
    assert set(forms(model)) == HELD.get(name, {name})
    one, two = (step(m, Attention(m), TOKENS, list(range(len(TOKENS)))) for m in (plain, model))
    assert torch.equal(one, two) and one.std() > 0
    assert packed_bytes(model) < 0.65 * packed_bytes(plain)
    assert 0 < weight_bytes(file, model.dtype, "auto") < 0.8 * weight_bytes(file, model.dtype)  # embeddings are not


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_experts_and_parts_of_members(tmp_path, name):
    config = transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32, norm_topk_prob=True
    )
    values = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 128}
    file = write(save(config, tmp_path / "source"), tmp_path, "qwen3moe", lambda own: name, **values).file
    model = load_split(file, dtype="bfloat16", quantised="auto")
    assert set(forms(model)) == {name}
    assert torch.equal(logits(file, "bfloat16", quantised="auto"), logits(file, "bfloat16"))
    for part in (ModelPart(2, 0), ModelPart(2, 1), ModelPart(2, 1, ep=True)):
        plain, model = (load_split(file, dtype="float32", quantised=q, part=part) for q in (None, "auto"))
        assert set(forms(model)) == {name}
        assert expanded(model) == expanded(plain)


def test_a_cut_within_blocks_is_dequantised(tmp_path):
    """Of 256 inputs in one block members have 128 each."""
    source = save(transformers.LlamaConfig(**{**LARGE, "intermediate_size": 256}), tmp_path / "source")
    file = write(source, tmp_path, "llama", lambda own: "Q4_K").file
    model = load_split(file, dtype="float32", quantised="auto", part=ModelPart(2, 0))
    assert set(forms(model)) == {"Q4_K", None}


def test_types_that_no_form_holds_are_dequantised(tmp_path):
    source = save(transformers.LlamaConfig(**LARGE), tmp_path / "source")
    file = write(source, tmp_path, "llama", lambda own: "IQ2_XS" if "ffn" in own else "IQ3_S").file
    assert set(forms(load_split(file, dtype="float32", quantised="auto"))) == {None}
    assert torch.equal(logits(file, "bfloat16", quantised="auto"), logits(file, "bfloat16"))


def test_scales_that_are_not_finite_are_refused(tmp_path):
    source = save(transformers.LlamaConfig(**LARGE), tmp_path / "source")
    file = write(source, tmp_path, "llama", lambda own: "Q8_0").file
    (entry,) = [t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight"]
    content = np.memmap(file, mode="r+")
    blocks = content[entry.data_offset : entry.data_offset + entry.n_bytes].reshape(-1, 34)
    blocks[:, :2] = np.array([np.inf], "<f2").view(np.uint8)
    content.flush()
    for weights in (None, "auto"):
        with pytest.raises(
            UserError, match=r"mlp\.up_proj\.weight' cannot be right: it has values that are not finite"
        ):
            load_split(file, dtype="bfloat16", quantised=weights)
