"""Random LoRA adapters of PEFT, and what PEFT makes of a model with one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.steps import Attention

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # parameters
FOUR = {  # adapters of a Llama that differ in what they update and how
    "all": dict(target_modules=ALL, r=4, lora_alpha=8),
    "attention": dict(target_modules=["q_proj", "v_proj"], r=20, lora_alpha=10, use_rslora=True),
    "mlp": dict(target_modules=["gate_proj", "down_proj"], r=8, lora_alpha=24),
    "one-layer": dict(target_modules=ALL, r=2, lora_alpha=8, layers_to_transform=[1]),
}
OF_EXPERTS = {  # the same of a model with layers of experts
    "all": dict(target_modules=ALL[:4], target_parameters=EXPERTS, r=4, lora_alpha=8),
    "attention": FOUR["attention"],
    "mlp": dict(target_modules=[], target_parameters=EXPERTS[1:], r=20, lora_alpha=24),
    "one-layer": dict(target_modules=["lm_head"], target_parameters=["layers.0." + EXPERTS[0]], r=2, lora_alpha=8),
}
OTHERS = {  # arguments of PEFT's configs of two adapters, by architecture
    "phi3": [
        dict(target_modules=["qkv_proj", "gate_up_proj"], r=4, rank_pattern={"layers.1.self_attn.qkv_proj": 18}),
        dict(target_modules=["o_proj", "down_proj", "gate_up_proj"], r=8),
    ],
    "gpt2": [
        dict(target_modules=["c_attn", "c_fc"], r=4, fan_in_fan_out=True),
        dict(target_modules=["c_fc", "attn.c_proj"], r=6, fan_in_fan_out=True),
    ],
    "qwen3_moe": [
        dict(target_modules=["q_proj", "k_proj"], target_parameters=EXPERTS, r=8),
        dict(target_modules=["v_proj", "o_proj"], target_parameters=EXPERTS[1:], r=4),
    ],
    "gpt_oss": [
        dict(target_modules=[], target_parameters=EXPERTS, r=20),
        dict(target_modules=["v_proj", "lm_head"], target_parameters=EXPERTS[:1], r=4),
    ],
    "mixtral": [dict(target_modules=[], target_parameters=EXPERTS, r=4), dict(target_modules=["lm_head"], r=4)],
    "gemma3": [dict(target_modules=["gate_proj", "q_proj"], r=8), dict(target_modules=ALL, r=4)],
}


def adapter(model, folder, seed: int = 0, **options) -> Path:
    """Write a random adapter of the model in `model`."""
    torch.manual_seed(seed)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), LoraConfig(**options))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape) * weight.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    return folder


def edit(folder, change) -> None:
    """Change the tensors of an adapter, in place."""
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    change(tensors)
    save_file(tensors, f"{folder}/adapter_model.safetensors")


def state(folder, **values) -> None:
    """Change what the config of an adapter states."""
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def four(model, folder) -> dict[str, str]:
    """Write FOUR adapters, or those OF_EXPERTS; return their directories by name."""
    four = OF_EXPERTS if "num_experts_per_tok" in json.loads((Path(model) / "config.json").read_text()) else FOUR
    made = ((name, adapter(model, folder / name, seed, **how)) for seed, (name, how) in enumerate(four.items()))
    return {name: str(path) for name, path in made}


def theirs(model, folder) -> PreTrainedModel:
    """Return the merged model."""
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder
    ).merge_and_unload()


def of_first_tokens(model, ids, adapters=None) -> torch.Tensor:
    """Return the logits of tokens that are each the first of a sequence, and have these adapters."""
    count, positions = len(ids), torch.zeros(len(ids), dtype=torch.int64)
    attention, o = Attention(model), None
    context = (torch.as_tensor(ids), positions, torch.arange(count), *(() if adapters is None else (adapters,)))
    for layer in range(len(model.attends)):
        rows, context = model.slice(layer, o, context)
        o = attention(layer, list(range(count)), positions, *rows)
    return model.logits(o, context)
