"""An adapter merged at load gives what PEFT's merged model gives, and one that cannot be merged is refused by name."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode.config import Job
from hpcdecode.data.results.identity import differences, identity
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.lower import quantize
from hpcdecode.model.run.load import ModelPart
from tests.support.adapters import adapter, edit, state, theirs
from tests.support.gguf_files import write
from tests.support.quantised import pair
from tests.support.steps import Attention, step

IDS = [5, 77, 300, 12, 9, 450, 33, 2]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {  # by the name of the model
    "llama2": dict(target_modules=[*ATTENTION, "up_proj", "down_proj"], r=4, lora_alpha=8),
    "phi3": dict(
        target_modules=["qkv_proj", "gate_up_proj"],
        r=4,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.qkv_proj": 6},
        alpha_pattern={"gate_up_proj": 3},
    ),
    "qwen3_moe": dict(target_modules=ATTENTION, r=8, lora_alpha=16),
    "gpt2": dict(target_modules=["c_attn", "c_fc"], r=4, lora_alpha=8, fan_in_fan_out=True),
}


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def projections(model):
    """The weights that the slices of a model on the CPU have bound."""
    stretches = [s for i in range(len(model.attends) + 1) for s in model._slices[i].stretches]
    return [weight for s in stretches for weight in s.weights if isinstance(weight, torch.Tensor)]


def logits(model, folder, **options):
    model = load_split(model, dtype="float32", lora=folder and str(folder), **options)
    return step(model, Attention(model), [(0, i, token) for i, token in enumerate(IDS)], list(range(len(IDS))))


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_and_greedy_tokens_are_those_of_the_merged_model(name, checkpoint, tmp_path):
    path, folder = checkpoint(name), adapter(checkpoint(name), tmp_path, **ADAPTERS[name])
    merged = theirs(path, folder).eval()
    with torch.no_grad():
        expected = merged(torch.tensor([IDS])).logits[0]
        tokens = merged.generate(torch.tensor([IDS]), max_new_tokens=16, do_sample=False, min_new_tokens=16)[0]
    own = logits(path, folder)
    close(own, expected)
    assert (own - logits(path, None)).abs().max() > 0.1
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    out = LLM(path, lora=folder, dtype="float32", threads=1).generate(
        [{"prompt_token_ids": IDS}], params, use_tqdm=False
    )
    assert list(out[0].outputs[0].token_ids) == tokens[len(IDS) :].tolist()


@pytest.mark.parametrize(("name", "module", "says"), [("gpt2", "attn.c_proj", False), ("llama2", "o_proj", True)])
def test_the_model_decides_how_a_square_weight_is_stored(name, module, says, checkpoint, tmp_path):
    """PEFT sets a `fan_in_fan_out` right that is not that of the layer's class; the shape alone would not tell."""
    path = checkpoint(name)
    folder = adapter(path, tmp_path, target_modules=[module], r=4, fan_in_fan_out=not says)
    (config,) = tmp_path.rglob("adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"fan_in_fan_out": says}))
    with torch.no_grad():
        expected = theirs(path, folder).eval()(torch.tensor([IDS])).logits[0]
    own = logits(path, folder)
    close(own, expected)
    assert (own - logits(path, None)).abs().max() > 1e-3


def fp8(stem, weight):
    scale = weight.abs().max() / 400
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale.view(1, 1)}, codes.float() * scale


@pytest.fixture
def folder(checkpoint, tmp_path):
    return adapter(checkpoint("llama2"), tmp_path / "adapter", **ADAPTERS["llama2"])


@pytest.fixture
def merged(checkpoint, folder, tmp_path):
    """The directory of the merged model."""
    path = shutil.copytree(checkpoint("llama2"), tmp_path / "merged")
    theirs(checkpoint("llama2"), folder).save_pretrained(path)
    return path


def test_quantised_weights_are_merged_before_they_are_rounded(checkpoint, folder, tmp_path):
    stated = {"quant_method": "fp8", "weight_block_size": [256, 256]}
    made = pair(checkpoint("llama2"), tmp_path, fp8, stated)
    close(logits(made.quantised, folder), logits(made.plain, folder))
    close(logits(made.quantised, folder, quantised="auto"), logits(made.plain, folder))  # others stay in few bits
    own, plain = (load_split(path, dtype="bfloat16", lora=str(folder)) for path in made)
    for a, b in zip(projections(own), projections(plain), strict=True):
        assert torch.equal(a, b)


def test_a_gguf_file_takes_it(folder, tmp_path, checkpoint):
    made = write(checkpoint("llama2"), tmp_path, "llama", lambda name: "Q8_0")
    close(logits(made.file, folder), logits(made.plain, folder))


@pytest.mark.parametrize("options", [{}, {"part": ModelPart(2, 0)}, {"part": ModelPart(2, 1)}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_bound_is_of_the_merged_model(options, dtype, checkpoint, folder, merged):
    """Also for members, which take parts of weights. PEFT adds in another order: the last bit may differ."""
    own = load_split(checkpoint("llama2"), dtype=dtype, lora=str(folder), **options)
    expected = load_split(merged, dtype=dtype, **options)
    for a, b in zip(projections(own), projections(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-6)


@pytest.mark.skipif(not quantize.exact(), reason="this CPU has no exact int8 products")
def test_int8_weights_are_those_of_the_merged_model(checkpoint, folder, merged):
    close(logits(checkpoint("llama2"), folder, quantised="int8"), logits(merged, None, quantised="int8"))


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WRAPPED = Q.replace(".lora_", ".base_layer.lora_")
OTHER = "base_model.model.model.layers.9.self_attn.q_proj.lora_"


def magnitudes(tensors, size):
    return [{key.replace("A.weight", "magnitude_vector"): torch.ones(size)} for key in tensors if "lora_A" in key]


REFUSED = {
    "dora": (lambda p: state(p, use_dora=True), "lora_magnitude_vector with use_dora alone, got .* otherwise"),
    "magnitudes": (
        lambda p: (state(p, use_dora=True), edit(p, lambda t: [t.update(each) for each in magnitudes(t, 3)])),
        r"with magnitudes \[\d+\] of floating point, got F32 \[3\]",
    ),
    "whole": (
        lambda p: edit(p, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(5, 64)})),
        r"'lm_head.weight' of shape \[512, 64\] and of floating point, got F32 \[5, 64\]",
    ),
    "whole of another model": (
        lambda p: edit(p, lambda t: t.update({"base_model.model.score.weight": torch.zeros(5, 64)})),
        "weights of the model, got 'score', which it does not have",
    ),
    "parameters": (lambda p: state(p, target_parameters="a"), "target_parameters to be names, got 'a'"),
    "wrapped": (
        lambda p: edit(p, lambda t: t.update({f"{WRAPPED}{o}.weight": t[f"{Q}{o}.weight"].clone() for o in "AB"})),
        "one update a module, got 'model.layers.0.self_attn.q_proj.base_layer'",
    ),
    "bias": (lambda p: state(p, bias="some"), "bias to be one of none, all, lora_only, got 'some'"),
    "new": (lambda p: state(p, use_something=1), "no use_something, got 1"),
    "type": (lambda p: state(p, peft_type="LOHA"), "an adapter of type LORA, got 'LOHA'"),
    "pissa": (lambda p: state(p, init_lora_weights="pissa"), "that keep the model's, got 'pissa'"),
    "rank": (lambda p: state(p, r=-1), "a rank from 1 to"),
    "another rank": (lambda p: state(p, r=5), r"with A \[5, in\] and B \[out, 5\]"),
    "alpha": (lambda p: state(p, lora_alpha="8"), "lora_alpha to be a finite number, got '8'"),
    "infinite": (lambda p: state(p, lora_alpha=float("inf")), "lora_alpha to be a finite number, got inf"),
    "large": (lambda p: state(p, lora_alpha=10**400), "lora_alpha to be a finite number, got 1000"),
    "pattern": (lambda p: state(p, rank_pattern={"(a+)+": 3}), r"names of modules in rank_pattern, got '\(a\+\)\+'"),
    "no config": (lambda p: (p / "adapter_config.json").unlink(), "a file adapter_config.json, got none"),
    "json": (lambda p: (p / "adapter_config.json").write_text("["), "expected a JSON object"),
    "cut off": (
        lambda p: (p / "adapter_model.safetensors").write_bytes(b"\x08"),
        "truncated or not safetensors",
    ),
    "pickled": (
        lambda p: (p / "adapter_model.safetensors").rename(p / "adapter_model.bin"),
        r"adapter_model.safetensors, got none \(adapter_model.bin is pickled",
    ),
    "alone": (lambda p: edit(p, lambda t: t.pop(f"{Q}A.weight")), "lora_A and lora_B of .* got lora_B alone"),
    "shape": (
        lambda p: edit(p, lambda t: t.update({f"{Q}B.weight": torch.zeros(7, 4)})),
        r"q_proj' of shape \[64, 64\], got an update of \[7, 64\]",
    ),
    "integers": (
        lambda p: edit(p, lambda t: t.update({f"{Q}B.weight": torch.zeros(64, 4, dtype=torch.int8)})),
        "of floating point, got F32 .* and I8",
    ),
    "magnitude": (lambda p: edit(p, lambda t: t.update({f"{Q}magnitude_vector": torch.ones(4)})), "lora_magnitude"),
    "another model": (
        lambda p: edit(p, lambda t: t.update({f"{OTHER}{own}.weight": t[f"{Q}{own}.weight"].clone() for own in "AB"})),
        "got 'model.layers.9.self_attn.q_proj', which it does not have",
    ),
    "not finite": (
        lambda p: edit(p, lambda t: t[f"{Q}A.weight"].fill_(float("nan"))),
        "q_proj",
    ),
    "one not finite": (
        lambda p: edit(p, lambda t: t[f"{Q}A.weight"][-1, -1:].fill_(float("nan"))),
        "expected finite numbers, got others in an update of 'model.layers.0.self_attn.q_proj' times",
    ),
    "scale": (lambda p: state(p, lora_alpha=1e308), "expected finite numbers, got others in an update of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, checkpoint, folder):
    change, expected = REFUSED[name]
    change(folder)
    with pytest.raises(UserError, match=expected):
        load_split(checkpoint("llama2"), dtype="float32", lora=str(folder))


def test_a_weight_that_is_tied_to_another_is_refused(checkpoint, tmp_path):
    folder = adapter(checkpoint("llama3"), tmp_path, target_modules=["lm_head"], r=4, lora_alpha=8)
    edit(folder, lambda tensors: tensors.pop("base_model.model.lm_head.base_layer.weight"))
    with pytest.raises(UserError, match="'lm_head', which is tied to another weight"):
        load_split(checkpoint("llama3"), dtype="float32", lora=str(folder))


def test_a_job_is_another_with_another_adapter(folder):
    job = Job(model="demo", prompts=("-",), output="out.h5")
    plain = identity(job, ["-"], "float32", "float32")
    own = identity(msgspec.structs.replace(job, lora=str(folder)), ["-"], "float32", "float32")
    assert "lora" not in plain  # as in results of earlier versions
    assert list(differences(plain, own)) == ["lora changed"] == list(differences(own, plain))
    state(folder, lora_alpha=9)
    other = identity(msgspec.structs.replace(job, lora=str(folder)), ["-"], "float32", "float32")
    assert list(differences(own, other)) == ["lora.adapter_config.json changed"]
