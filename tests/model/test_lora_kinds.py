"""Adapters of experts, DoRA, and adapters that bring whole tensors: merged as PEFT merges them."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.run.load import ModelPart
from tests.support.adapters import ALL, EXPERTS, adapter, edit, state, theirs
from tests.support.gguf_files import GPT_OSS, GPT_OSS_VALUES, SHAPE, write
from tests.support.models import save
from tests.support.steps import Attention, step

IDS = [5, 77, 300, 12, 9, 450, 33, 2]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = {  # a model, and arguments of PEFT's config
    "experts": ("qwen3_moe", dict(target_modules=["q_proj"], target_parameters=EXPERTS, r=4, lora_alpha=8)),
    "experts, transposed": ("gpt_oss", dict(target_modules=[], target_parameters=EXPERTS, r=6, use_rslora=True)),
    "experts of one name": ("mixtral", dict(target_modules=["o_proj"], target_parameters=EXPERTS[1:], r=4)),
    "experts of a layer": ("mixtral", dict(target_parameters=["layers.1.mlp.experts.gate_up_proj"], r=4)),
    "ranks of parameters": (
        "gpt_oss",
        dict(target_parameters=EXPERTS, r=4, rank_pattern={"experts.down_proj": 2}, alpha_pattern={EXPERTS[0]: 16}),
    ),
    "router": ("mixtral", dict(target_parameters=["mlp.gate.weight", *EXPERTS], r=4)),
    "magnitudes": ("llama2", dict(target_modules=ALL, r=4, use_dora=True)),
    "magnitudes, transposed": (
        "gpt2",
        dict(target_modules=["c_attn", "c_fc"], r=4, use_dora=True, fan_in_fan_out=True),
    ),
    "head": ("llama2", dict(target_modules=["lm_head", "q_proj"], r=4)),
    "whole": ("llama2", dict(target_modules=["q_proj"], r=4, modules_to_save=["embed_tokens", "lm_head", "norm"])),
    "biases": ("gpt2", dict(target_modules=["c_attn"], r=4, bias="all", fan_in_fan_out=True)),
    "biases of updated layers": ("gpt2", dict(target_modules=["c_attn"], r=4, bias="lora_only", fan_in_fan_out=True)),
}

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=32, norm_topk_prob=True)
GGUF = {  # a config, and metadata that the writer does not take from it
    "qwen3moe": (
        lambda: Qwen3MoeConfig(**SHAPE, **MOE),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96},
    ),
    "gpt-oss": (lambda: GptOssConfig(**GPT_OSS, rope_parameters=ROPE), GPT_OSS_VALUES),
}


def logits(model, folder=None, **options):
    made = load_split(model, dtype="float32", lora=folder and str(folder), **options)
    return step(made, Attention(made), [(0, i, token) for i, token in enumerate(IDS)], list(range(len(IDS))))


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_model(kind, checkpoint, tmp_path):
    name, options = KINDS[kind]
    model = checkpoint(name)
    folder = adapter(model, tmp_path, **options)
    found = logits(model, folder)
    close(found, theirs(model, folder).eval()(torch.tensor([IDS])).logits[0])
    assert (found - logits(model)).abs().max() > 0.01


@pytest.mark.parametrize("options", [{}, {"part": ModelPart(2, 1)}, {"part": ModelPart(2, 0, ep=True)}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_what_is_bound_of_experts_is_of_the_merged_model(name, options, checkpoint, tmp_path):
    """Also for members, which take parts of weights, and where tensors of the checkpoint are of all experts."""
    model = checkpoint(name)
    folder = adapter(model, tmp_path / "a", target_parameters=EXPERTS, r=4)
    merged = shutil.copytree(model, tmp_path / "merged")
    theirs(model, folder).save_pretrained(merged)
    own, expected = (
        load_split(model, dtype="float32", lora=str(folder), **options),
        load_split(merged, dtype="float32", **options),
    )
    for a, b in zip(weights(own), weights(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def weights(model):
    stretches = [s for i in range(len(model.attends) + 1) for s in model._slices[i].stretches]
    return [weight for s in stretches for weight in s.weights if isinstance(weight, torch.Tensor)]


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_a_gguf_file_of_stacked_experts_takes_it(name, tmp_path):
    config, values = GGUF[name]
    source = save(config(), tmp_path / "source")
    made = write(
        source, tmp_path, name, lambda own: "MXFP4" if name == "gpt-oss" and "exps" in own else "Q8_0", **values
    )
    folder = adapter(source, tmp_path / "a", target_parameters=EXPERTS, r=4)
    close(logits(made.file, folder), logits(made.plain, folder))


def swap(tensors):
    """Let A and B of experts stand as versions of PEFT before 0.19 wrote them."""
    for key in [key for key in tensors if "experts" in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        a, b = tensors[key], tensors[other]
        experts = 8
        rank = len(a) // experts
        of_each = [(a[e * rank : (e + 1) * rank], b[:, e::experts]) for e in range(experts)]
        tensors[key] = torch.cat([one.t() for _, one in of_each]).contiguous()
        swapped = tensors[other] = torch.empty(a.shape[1], len(a))
        for e, (one, _) in enumerate(of_each):
            swapped[:, e::experts] = one.t()


def test_adapters_of_experts_of_earlier_versions_of_peft(checkpoint, tmp_path):
    model = checkpoint("qwen3_moe")
    folder = adapter(model, tmp_path / "a", target_parameters=EXPERTS, r=4)
    expected = logits(model, folder)
    edit(folder, swap)
    state(folder, peft_version="0.18.1")
    close(logits(model, folder), expected)


def test_of_square_weights_the_version_says_which_is_which(checkpoint, tmp_path):
    """32 inputs and outputs of each projection, so the shapes of A and B do not tell."""
    config = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe")).config
    config.moe_intermediate_size = config.hidden_size // 2  # so gate_up_proj is [E, hidden, hidden]
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "m")
    folder = adapter(tmp_path / "m", tmp_path / "a", target_parameters=EXPERTS[:1], r=4)
    expected = logits(tmp_path / "m", folder)
    close(expected, theirs(tmp_path / "m", folder).eval()(torch.tensor([IDS])).logits[0])
    edit(folder, swap)
    state(folder, peft_version="0.18.1")
    close(logits(tmp_path / "m", folder), expected)
    state(folder, peft_version=None)
    close(logits(tmp_path / "m", folder), expected)


DAMAGED = {
    "shape": (lambda t: t.update({f"{KEY}lora_B.weight": torch.zeros(7, 32)}), r"down_proj' of shape \[64, 32\]"),
    "rank": (lambda t: t.update({f"{KEY}lora_A.weight": torch.zeros(31, 32)}), r"with A \[32, in\] and B \[out, 32\]"),
    "one alone": (lambda t: [t.pop(key) for key in list(t) if f"{KEY}base" in key], "got another number of them"),
    "three": (
        lambda t: t.update(
            {
                f"{KEY}base_layer.base_layer.{own}.weight": t[f"{KEY}{own}.weight"].clone()
                for own in ("lora_A", "lora_B")
            }
        ),
        "updates of .*gate_up_proj, .*down_proj, got another number of them",
    ),
    "not finite": (
        lambda t: t[f"{KEY}lora_A.weight"][-1].fill_(float("nan")),
        "finite numbers, got others in an update of",
    ),
}
KEY = "base_model.model.model.layers.0.mlp.experts."


@pytest.mark.parametrize("name", DAMAGED)
def test_an_adapter_of_experts_that_does_not_fit_is_refused(name, checkpoint, tmp_path):
    change, expected = DAMAGED[name]
    folder = adapter(checkpoint("qwen3_moe"), tmp_path / "a", target_parameters=EXPERTS, r=4)
    edit(folder, change)
    with pytest.raises(UserError, match=expected):
        load_split(checkpoint("qwen3_moe"), dtype="float32", lora=str(folder))
