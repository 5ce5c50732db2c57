"""Adapters of experts and of the LM head that rows choose, on CPUs of any kind and as devices compute them."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.adapters import EXPERTS, adapter, of_first_tokens
from tests.support.isas import OWN_GEMMS, use_isa
from tests.support.recorders import as_on_a_device

IDS = [(11 * i) % 500 + 2 for i in range(70)]
OF_TOKENS = torch.tensor([(i * i + i // 3) % 3 - 1 for i in range(70)])
KINDS = {  # a model, and arguments of PEFT's configs of two adapters
    "experts": (
        "qwen3_moe",
        dict(target_modules=["q_proj"], target_parameters=EXPERTS, r=4),
        dict(target_modules=["o_proj"], target_parameters=EXPERTS[1:], r=20),
    ),
    "experts and head": (
        "gpt_oss",
        dict(target_modules=[], target_parameters=EXPERTS, r=4),
        dict(target_modules=["lm_head", "v_proj"], r=4),
    ),
    "attention": ("qwen3_moe", dict(target_modules=["q_proj", "v_proj"], r=8), dict(target_modules=["o_proj"], r=20)),
    "head": ("llama2", dict(target_modules=["lm_head"], r=4), dict(target_modules=["lm_head", "up_proj"], r=20)),
}


@pytest.fixture(params=KINDS)
def case(request, checkpoint, tmp_path):
    """A model and its adapters, whose A and B are random."""
    name, *options = KINDS[request.param]
    folders = {f"a{i}": str(adapter(checkpoint(name), tmp_path / f"a{i}", i, **how)) for i, how in enumerate(options)}
    return checkpoint(name), folders


def check(model, plain, merged, near, alone=True):
    """Compare rows of all adapters and of none with those of the models alone, and of one row with itself alone.

    near: the most that a logit may differ. With experts a few rows may differ more: rounding may choose another expert.
    """
    found, none = of_first_tokens(model, IDS, OF_TOKENS), OF_TOKENS < 0
    assert torch.equal(found[none], of_first_tokens(plain, IDS)[none])
    assert torch.equal(of_first_tokens(model, IDS), of_first_tokens(plain, IDS))
    for number, one in enumerate(merged):
        own = number == OF_TOKENS
        differ = (found[own].float() - of_first_tokens(one, IDS)[own]).abs().amax(1)
        assert (differ <= near).float().mean() > 0.8 and (differ <= near).all() >= (near < 0.01)
        assert (found[own] - of_first_tokens(plain, IDS)[own]).abs().max() > 0.01
    for i in (3, 4, 8) if alone else ():
        assert torch.equal(of_first_tokens(model, IDS[i : i + 1], OF_TOKENS[i : i + 1])[0], found[i])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", [*OWN_GEMMS, "generic"])
def test_every_instruction_set_computes_what_the_merged_models_do(isa, dtype, case, monkeypatch):
    use_isa(monkeypatch, isa)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    path, folders = case
    load = partial(load_split, path, dtype="float32")
    check(
        load_split(path, dtype=dtype, adapters=folders),
        load_split(path, dtype=dtype),
        [load(lora=folder) for folder in folders.values()],
        1e-3 if dtype == "float32" else 0.25,
        alone=isa != "generic",
    )


@pytest.mark.parametrize(
    ("case", "inductor"),
    [
        *((kind, False) for kind in KINDS),
        ("experts and head", True),
        *(pytest.param(kind, True, marks=pytest.mark.full) for kind in KINDS if kind != "experts and head"),
    ],
    indirect=["case"],
)
def test_devices_compute_what_the_merged_models_do(inductor, case, monkeypatch):
    path, folders = case
    merged = [load_split(path, dtype="float32", lora=folder) for folder in folders.values()]
    as_on_a_device(monkeypatch, inductor=inductor)
    load = partial(load_split, path, dtype="float32")
    check(load(adapters=folders), load(), merged, 1e-3, alone=False)


@pytest.mark.parametrize("quantised", ["int8", "int4"])
def test_adapters_stay_as_they_are_beside_quantised_weights(quantised, case):
    """What they add to the logits is that of the merged model, up to what quantising that changes elsewhere."""
    path, folders = case
    model, plain = (load_split(path, dtype="bfloat16", quantised=quantised, adapters=a) for a in (folders, None))
    found, none = of_first_tokens(model, IDS, OF_TOKENS), OF_TOKENS < 0
    assert torch.equal(found[none], of_first_tokens(plain, IDS)[none])
    assert (found[~none] - of_first_tokens(plain, IDS)[~none]).abs().max() > 0.01


def of_single_experts(model, folder):
    """Write an adapter of some experts, each a module, and the model with it merged; return both directories."""
    made, tensors = adapter(model, folder / "a", target_modules=["q_proj"], r=4, lora_alpha=8), {}
    merged = shutil.copytree(model, folder / "merged")
    weights = load_file(merged / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for e, name in ((0, "gate_proj"), (0, "up_proj"), (3, "up_proj"), (5, "down_proj"), (7, "gate_proj")):
        key = f"model.layers.0.mlp.experts.{e}.{name}"
        outputs, inputs = weights[f"{key}.weight"].shape
        a, b = (torch.randn(shape, generator=generator) * 0.3 for shape in ((4, inputs), (outputs, 4)))
        tensors |= {f"base_model.model.{key}.lora_A.weight": a, f"base_model.model.{key}.lora_B.weight": b}
        weights[f"{key}.weight"] += 2 * b @ a
    save_file(tensors, made / "adapter_model.safetensors")
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return str(made), merged


def test_adapters_of_single_experts(checkpoint, tmp_path):
    """As versions of transformers before 5 had them: every expert's projections are modules."""
    path = checkpoint("qwen3_moe")
    folder, merged = of_single_experts(path, tmp_path)
    wanted = of_first_tokens(load_split(merged, dtype="float32"), IDS)
    torch.testing.assert_close(
        of_first_tokens(load_split(path, dtype="float32", lora=folder), IDS), wanted, rtol=1e-4, atol=1e-4
    )
    model = load_split(path, dtype="float32", adapters={"other": folder, "own": folder})
    torch.testing.assert_close(
        of_first_tokens(model, IDS, torch.ones(70, dtype=torch.int64)), wanted, rtol=1e-4, atol=1e-4
    )


def test_a_head_that_is_tied_to_embeddings(checkpoint, tmp_path):
    """The embeddings stay as they are, as PEFT has it before it merges."""
    path = checkpoint("llama3")
    folder = adapter(path, tmp_path / "a", target_modules=["lm_head", "q_proj"], r=4)
    model = load_split(path, dtype="float32", adapters={"a": str(folder)})
    found = of_first_tokens(model, IDS, torch.zeros(70, dtype=torch.int64))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), folder)
    torch.testing.assert_close(found, theirs(torch.tensor(IDS)[:, None]).logits[:, 0], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="weights of one use each, got 'lm_head', which is tied to another weight"):
        load_split(path, dtype="float32", lora=str(folder))


def test_what_cannot_be_chosen_is_refused(checkpoint, tmp_path):
    path = checkpoint("qwen3_moe")
    folder = adapter(path, tmp_path / "a", target_parameters=["mlp.gate.weight"], r=4)
    assert load_split(path, dtype="float32", adapters={"router": str(folder)})
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "lora_B" in key)
    save_file({**tensors, key: torch.zeros(9, 4)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"router=.*mlp.gate.weight' of shape \[8, 64\], got an update of \[9, 64\]"):
        load_split(path, dtype="float32", adapters={"router": str(folder)})
