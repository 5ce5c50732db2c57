"""Quantised checkpoints that are large enough to see in a process's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.support.quantised import state

HIDDEN, INNER, LAYERS, VOCAB = 1024, 3072, 8, 512
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # weights


def write_large(folder: Path, quantised: Callable[[int, int], dict[str, Tensor]], stated: dict[str, object]) -> Path:
    """Write a checkpoint of 117 million weights, of which all layers are alike; returns `folder`.

    Args:
        folder: Where to; it is made if need be.
        quantised: Returns what stands for a weight of so many rows and columns, by what the keys end with.
        stated: What config.json states of it.
    """
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=16).save_pretrained(folder)
    state(folder, stated)
    ends = {key: torch.zeros(VOCAB, HIDDEN) for key in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors = {"model.norm.weight": torch.ones(HIDDEN), **ends}
    inner = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    shapes = {f"mlp.{m}_proj": shape for m, shape in inner.items()}
    shapes |= {f"self_attn.{m}_proj": (HIDDEN, HIDDEN) for m in "qkvo"}
    layer = {f"{module}.{name}": t for module, shape in shapes.items() for name, t in quantised(*shape).items()}
    layer |= {f"{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("input", "post_attention")}
    for i in range(LAYERS):
        tensors |= {f"model.layers.{i}.{name}": t.clone() for name, t in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
