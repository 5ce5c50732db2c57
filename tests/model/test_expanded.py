"""Weights in few bits on a device: expanded to the numbers that CPUs multiply by, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from hpcdecode import _attn_cuda_emulated
from hpcdecode.config import EngineOptions
from hpcdecode.engine import weight_facts
from hpcdecode.engine.weight_facts import quantised
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, GGUF_BLOCKS
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.expanded import EXPAND, expands
from hpcdecode.model.lower.few_bits import ALL_FORMS, FORMS
from hpcdecode.model.run import load
from hpcdecode.model.run.load import ModelPart, require_quantised
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.blocks import numbers_of, random_weight
from tests.support.packed_products import multiply
from tests.support.quantised import forms
from tests.support.recorders import as_on_a_device
from tests.support.steps import Attention, step

TOKENS = [(row, place, (17 * place + row) % 500 + 2) for row in range(2) for place in range(9)]
SHAPES = ((70, 512), (32, 256), (1, 1280), (160, 2304))  # outputs and inputs; some panels and runs are not whole
DTYPES = (torch.float32, torch.bfloat16)


def parts_of(bits: str, outputs: int, inputs: int) -> list[Tensor]:
    """Random numbers, or blocks, in two parts."""
    if bits in BLOCKS:
        whole = random_weight(bits, outputs, inputs, seed=inputs)
    else:
        whole = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.05
    return list(whole.tensor_split([outputs // 3]))


def matrix(bits: str, packed: Tensor, outputs: int, inputs: int, dtype: torch.dtype, experts: int = 1) -> Tensor:
    found: Tensor = EXPAND(packed, ALL_FORMS[bits].native.value, experts, outputs, inputs, dtype)
    return found


def logits(model, tokens=TOKENS) -> Tensor:
    return step(model, Attention(model), tokens, list(range(len(tokens)))).float()


@pytest.mark.parametrize("bits", [*FORMS, *BLOCKS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_have_the_numbers_that_cpus_multiply_by(bits, dtype):
    ragged = () if bits in GGUF_BLOCKS else ((9, 320),)
    for outputs, inputs in SHAPES + ragged:
        parts = parts_of(bits, outputs, inputs)
        packed = packed_weights.pack_few_bits(bits, parts, torch.randn(outputs))
        form = ALL_FORMS[bits].native
        unbiased = packed_weights.pack_few_bits(bits, parts)
        wanted = multiply(torch.eye(inputs, dtype=dtype), unbiased, outputs, form).t()
        assert torch.equal(matrix(bits, packed, outputs, inputs, dtype), wanted)
        if bits in BLOCKS:
            assert torch.equal(wanted, numbers_of(bits, torch.cat(parts)).to(dtype))


def test_experts_each_begin_with_a_panel_of_their_own():
    weights = torch.randn(5, 40, 64, generator=torch.Generator().manual_seed(0))
    each = [packed_weights.pack_few_bits("int4", [own]) for own in weights]
    found = matrix("int4", torch.cat(each), 40, 64, torch.float32, experts=5).view(5, 40, 64)
    assert all(
        torch.equal(own, matrix("int4", one, 40, 64, torch.float32)) for own, one in zip(found, each, strict=True)
    )


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2", "gemma2", "mixtral", "gpt_oss"])
def test_models_compute_what_they_do_on_cpus(checkpoint, monkeypatch, name, bits):
    """Merged, with biases, transposed, and of experts; the LM head stays as it is."""
    cpu = load_split(checkpoint(name), dtype="float32", quantised=bits)
    wanted, kept = logits(cpu), set(forms(cpu)) - {None}
    as_on_a_device(monkeypatch)
    model = load_split(checkpoint(name), dtype="float32", quantised=bits)
    assert set(forms(model)) == kept == {bits}
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    alone = torch.cat([logits(model, TOKENS[:9]), logits(model, [(0, *rest) for _, *rest in TOKENS[9:]])])
    torch.testing.assert_close(alone, logits(model), rtol=1e-4, atol=1e-5)


def test_torch_compiles_what_expands(checkpoint, monkeypatch):
    as_on_a_device(monkeypatch)
    wanted = logits(load_split(checkpoint("llama3"), dtype="float32", quantised="mxfp4"))
    as_on_a_device(monkeypatch, inductor=True)
    model = load_split(checkpoint("llama3"), dtype="float32", quantised="mxfp4")
    assert set(forms(model)) == {"mxfp4"}
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)


def test_a_member_expands_its_part(checkpoint, monkeypatch):
    as_on_a_device(monkeypatch)
    members = [
        load_split(checkpoint("llama3"), dtype="float32", quantised="fp8", part=ModelPart(2, rank)) for rank in range(2)
    ]
    assert [set(forms(member)) for member in members] == [{"fp8"}] * 2


def test_what_is_refused(monkeypatch):
    assert not any(expands(bits, 256, torch.float32) for bits in ("int8", None, "bfloat16"))
    assert expands("int4", 64, torch.bfloat16) and not expands("int4", 48, torch.bfloat16)
    assert not expands("int4", 64, torch.float16) and not expands("Q4_K", 64, torch.float32)
    with pytest.raises(UserError, match="--weights int8: expected S-ranks on CPUs, got cuda"):
        require_quantised("int8", torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(load, "built", lambda: False)
    with pytest.raises(UserError, match="--weights int4: expected an hpcdecode that was built with CUDA"):
        require_quantised("int4", torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(load, "built", lambda: True)
    require_quantised("int4", torch.device("cuda"), torch.bfloat16)
    with pytest.raises(UserError, match="--weights int4: expected float32 or bfloat16, got float16"):
        require_quantised("int4", torch.device("cuda"), torch.float16)
    with pytest.raises(ValueError, match="expected a form of weights in few bits"):
        _attn_cuda_emulated.expand_weights(0, 0, 0, "float32", 1, 32, 32, 0, 0)
    with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16"):
        _attn_cuda_emulated.expand_weights(1, 0, 0, "float16", 1, 32, 32, 0, 0)


def test_a_gpu_keeps_few_bits_only_if_the_weights_would_not_fit_otherwise(checkpoint, monkeypatch):
    options = EngineOptions(model=str(checkpoint("llama3")), dtype="bfloat16")
    whole = weight_bytes(Path(options.model), torch.bfloat16)

    def chosen(memory: float, **own: object) -> str | None:
        about = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
        return quantised(replace(options, **own), "bfloat16", "cuda:0")

    assert chosen(0) is None  # no GPU that hpcdecode has kernels for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(weight_facts, "built", lambda: True)
    assert chosen(1.1 * whole) == "auto" and chosen(1.3 * whole) is None
    assert chosen(0.7 * whole, tp=2) is None and chosen(0.7 * whole, weights="fp8") == "fp8"
    few = [weight_bytes(Path(options.model), torch.bfloat16, "int4", device) for device in ("cpu", "cuda")]
    assert few[0] == few[1] < 0.8 * whole
