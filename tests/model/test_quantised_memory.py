"""A quantised model is never in memory twice: each slice's weights are computed, packed, and let go."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.support.quantised import state

pytestmark = pytest.mark.system

HIDDEN, INNER, LAYERS, VOCAB = 1024, 3072, 8, 512
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # weights
SLACK = 200 << 20  # pages of the file that the system has not dropped yet, and what torch keeps
LOAD = """
import sys
import torch
from hpcdecode.model import load_split

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

load_split(sys.argv[1], dtype=sys.argv[2], weights=False)
before = status("VmRSS")
model = load_split(sys.argv[1], dtype=sys.argv[2], quantised="auto" if len(sys.argv) > 3 else None)
print(status("VmHWM") - before)
"""


@pytest.fixture
def large(tmp_path):
    """An FP8 checkpoint of 117 million weights, of random bytes."""
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
    ).save_pretrained(tmp_path)
    state(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    inner = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    shapes = {f"mlp.{m}_proj": shape for m, shape in inner.items()}
    shapes |= {f"self_attn.{m}_proj": (HIDDEN, HIDDEN) for m in "qkvo"}
    for i in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN)
        for module, (rows, columns) in shapes.items():
            key = f"model.layers.{i}.{module}.weight"
            tensors[key] = torch.randint(120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.full((rows // 128, columns // 128), 1e-4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_the_peak_is_the_weights_and_one_layer(large):
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(large), "float32"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    peak, weights, layer = int(done.stdout), 4 * LAYERS * LAYER, 4 * LAYER
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, a layer {layer >> 20} MiB")
    assert weights < peak < weights + layer + SLACK < 2 * weights


def test_the_peak_is_the_weights_in_few_bits_and_one_layer(large):
    line = [sys.executable, "-c", LOAD, str(large), "bfloat16", "auto"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, weights, layer = int(done.stdout), LAYERS * LAYER * 33 // 32, 2 * LAYER
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, a layer {layer >> 20} MiB")
    assert weights < peak < weights + layer + SLACK
