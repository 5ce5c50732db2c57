"""A quantised model is never in memory twice: each slice's weights are computed, packed, and let go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig

from tests.support.large_checkpoints import HIDDEN, LAYER, LAYERS, VOCAB, write_large
from tests.support.quantised import state

pytestmark = pytest.mark.system

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
    return write_large(tmp_path, fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def fp8(rows: int, columns: int) -> dict[str, torch.Tensor]:
    codes = torch.randint(120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.full((rows // 128, columns // 128), 1e-4)}


def peak_of(path: Path, dtype: str, *more: str) -> int:
    """The bytes that loading a checkpoint takes at most, beyond those of a process that has traced it."""
    line = [sys.executable, "-c", LOAD, str(path), dtype, *more]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.full
def test_the_peak_is_the_weights_and_one_layer(large):
    peak, weights, layer = peak_of(large, "float32"), 4 * LAYERS * LAYER, 4 * LAYER
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, a layer {layer >> 20} MiB")
    assert weights < peak < weights + layer + SLACK < 2 * weights


def test_the_peak_is_the_weights_in_few_bits_and_one_layer(large):
    peak, weights, layer = peak_of(large, "bfloat16", "auto"), LAYERS * LAYER * 33 // 32, 2 * LAYER
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, a layer {layer >> 20} MiB")
    assert weights < peak < weights + layer + SLACK


EXPERTS = 32


@pytest.fixture
def oss(tmp_path):
    """A checkpoint of gpt-oss with 201 million weights of experts in MXFP4, of random bytes."""
    GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=EXPERTS,
        num_experts_per_tok=4,
    ).save_pretrained(tmp_path)
    state(tmp_path, {"quant_method": "mxfp4"})
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes = {"self_attn.sinks": (16,), "mlp.router.weight": (EXPERTS, HIDDEN), "mlp.router.bias": (EXPERTS,)}
        for name, outputs, inputs in (("q", 1024, HIDDEN), ("k", 128, HIDDEN), ("v", 128, HIDDEN), ("o", HIDDEN, 1024)):
            shapes |= {f"self_attn.{name}_proj.weight": (outputs, inputs), f"self_attn.{name}_proj.bias": (outputs,)}
        for name, outputs in (("gate_up", 2048), ("down", HIDDEN)):
            shapes[f"mlp.experts.{name}_proj_bias"] = (EXPERTS, outputs)
            blocks = torch.randint(256, (EXPERTS, outputs, HIDDEN // 32, 16), dtype=torch.uint8)
            tensors[f"{layer}mlp.experts.{name}_proj_blocks"] = blocks
            tensors[f"{layer}mlp.experts.{name}_proj_scales"] = torch.full(blocks.shape[:3], 118, dtype=torch.uint8)
        shapes |= {f"{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        tensors |= {layer + name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_experts_in_mxfp4_take_no_more_than_they_are_and_one_layer(oss):
    layer = EXPERTS * 3 * HIDDEN * 1024
    peak, weights = peak_of(oss, "bfloat16", "auto"), 2 * layer * 17 // 32
    print(f"peak {peak >> 20} MiB, experts {weights >> 20} MiB, a layer {2 * layer >> 20} MiB")
    assert weights < peak < weights + 2 * layer + 1.5 * SLACK
