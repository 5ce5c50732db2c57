"""A GGUF file is never dequantised as a whole: each slice's weights are computed, packed, and let go."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
import transformers

from tests.support.gguf_files import describe, random_blocks
from tests.support.models import tokenizer

pytestmark = pytest.mark.system

HIDDEN, INNER, LAYERS, VOCAB = 1024, 3072, 8, 512
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # weights
SLACK = 300 << 20  # pages of the file that the system has not dropped yet, and what torch keeps
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
    """A file of 117 million weights in Q4_K, of random blocks."""
    sizes = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=16)
    tokenizer().save_pretrained(tmp_path)
    writer, rng = gguf.GGUFWriter(tmp_path / "model.gguf", "llama"), np.random.default_rng(0)
    describe(writer, config.to_dict(), "llama", tmp_path, {})
    shapes = {f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    matrices = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}
    norms = [f"blk.{i}.{name}_norm.weight" for i in range(LAYERS) for name in ("attn", "ffn")]
    for name, shape in {**matrices, "token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}.items():
        kind = gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor(f"{name}.weight", random_blocks(kind, shape, rng), raw_dtype=kind)
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def peak_of(path, *options):
    """The bytes that loading a file takes at most, beyond those of a process that has traced it."""
    line = [sys.executable, "-c", LOAD, str(path), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_the_peak_is_the_weights_in_their_blocks(large):
    """And the file's own pages, at most, which the system may drop."""
    peak, weights, file = peak_of(large, "bfloat16", "auto"), LAYERS * LAYER * 37 // 64, large.stat().st_size
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, file {file >> 20} MiB")
    assert weights < peak < weights + file + (80 << 20) < 2 * LAYERS * LAYER


@pytest.mark.full
def test_the_peak_is_the_weights_and_one_layer(large):
    peak, weights, layer = peak_of(large, "float32"), 4 * LAYERS * LAYER, 4 * LAYER
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, a layer {layer >> 20} MiB")
    assert weights < peak < weights + layer + SLACK < 2 * weights
