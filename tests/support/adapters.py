"""Random LoRA adapters of PEFT, and what PEFT makes of a model with one."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FOUR = {  # adapters of a Llama that differ in what they update and how
    "all": dict(target_modules=ALL, r=4, lora_alpha=8),
    "attention": dict(target_modules=["q_proj", "v_proj"], r=20, lora_alpha=10, use_rslora=True),
    "mlp": dict(target_modules=["gate_proj", "down_proj"], r=8, lora_alpha=24),
    "one-layer": dict(target_modules=ALL, r=2, lora_alpha=8, layers_to_transform=[1]),
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
    "qwen3_moe": [dict(target_modules=["q_proj", "k_proj"], r=8), dict(target_modules=["v_proj", "o_proj"], r=4)],
    "gemma3": [dict(target_modules=["gate_proj", "q_proj"], r=8), dict(target_modules=ALL, r=4)],
}


def adapter(model, folder, seed: int = 0, **options) -> Path:
    """Write a random adapter of the model in `model`."""
    torch.manual_seed(seed)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), LoraConfig(**options))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape) * weight.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    return folder


def four(model, folder) -> dict[str, str]:
    """Write FOUR adapters; return their directories by name."""
    made = ((name, adapter(model, folder / name, seed, **how)) for seed, (name, how) in enumerate(FOUR.items()))
    return {name: str(path) for name, path in made}


def theirs(model, folder) -> PreTrainedModel:
    """Return the merged model."""
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder
    ).merge_and_unload()
