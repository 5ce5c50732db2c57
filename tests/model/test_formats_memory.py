"""No quantised format is in memory twice: loading takes what is kept, and what a layer's weights are computed in.

The weights are random bytes: how they are read is in the tests of each format.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.support.large_checkpoints import LAYER, LAYERS, write_large

pytestmark = pytest.mark.system

SLACK = 64 << 20  # what torch and the allocator keep beside weights
LOAD = """
import gc, json, sys
from ctypes import CDLL
from hpcdecode.model import load_split

malloc_trim = CDLL(None).malloc_trim

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

load_split(sys.argv[1], dtype="bfloat16", quantised="auto")  # imports what the first load needs
peaks = {}
for path in sys.argv[1:]:
    gc.collect()
    malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = status("VmRSS")
    model = load_split(path, dtype="bfloat16", quantised="auto")
    peaks[path] = status("VmHWM") - before
    del model
print(json.dumps(peaks))
"""


def ints(*shape, most=1 << 31):
    return torch.randint(-most, most, shape, dtype=torch.int32)


def octets(*shape):
    return torch.randint(120, shape, dtype=torch.uint8)


def scales(*shape, dtype=torch.float16):
    return torch.full(shape, 1e-3, dtype=dtype)


def gptq(rows, columns):
    groups = columns // 32
    return {
        "qweight": ints(columns // 8, rows),
        "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": scales(groups, rows),
        "g_idx": (torch.arange(columns) // 32).int(),
    }


def awq(rows, columns):
    groups = columns // 32
    return {"qweight": ints(columns, rows // 8), "qzeros": ints(groups, rows // 8), "scales": scales(groups, rows)}


def compressed(rows, columns):
    scale = scales(rows, columns // 32, dtype=torch.bfloat16)
    return {
        "weight_packed": ints(rows, columns // 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }


def int8(rows, columns):
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return {"weight": codes, "weight_scale": scales(rows, 1, dtype=torch.bfloat16)}


def nvfp4(rows, columns):
    return {
        "weight": octets(rows, columns // 2),
        "weight_scale": octets(rows, columns // 16).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1e-3),
        "input_scale": torch.tensor(0.5),
    }


def mxfp4(rows, columns):
    return {"weight": octets(rows, columns // 2), "weight_scale": octets(rows, columns // 32)}


def mxfp8(rows, columns):
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.randint(110, 120, (rows, columns // 32), dtype=torch.uint8)}


def nf4(rows, columns):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, about = functional.quantize_4bit(torch.randn(rows, columns), quant_type="nf4", blocksize=64)
    return {"weight": codes, **{f"weight.{name}": t for name, t in about.as_dict(packed=True).items()}}


def eight_bits(rows, columns):
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return {"weight": codes, "SCB": torch.ones(rows), "weight_format": torch.zeros((), dtype=torch.uint8)}


def tool(form, **weights):
    """What compressed-tensors states."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
FORMATS = {  # tensors of a weight, what is stated, and the bits of a weight in memory
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, 5),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, 5),
    "int4 of compressed-tensors": (
        compressed,
        tool("pack-quantized", num_bits=4, strategy="group", group_size=32),
        5,
    ),
    "int8 of compressed-tensors": (int8, tool("int-quantized", num_bits=8, strategy="channel"), 8.5),
    "MXFP4 of Quark": (
        mxfp4,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": QUARK, "input_tensors": None},
            "exclude": ["lm_head"],
            "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        },
        4.25,
    ),
    "NVFP4 of ModelOpt": (
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        4.625,
    ),
    "MXFP8 of ModelOpt": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, 8.25),
    "NF4 of bitsandbytes": (
        nf4,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
        },
        4.5,
    ),
    "8 bits of bitsandbytes": (
        eight_bits,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        8.25,
    ),
}


def test_loading_takes_what_is_kept_and_one_layer(tmp_path):
    for name, (quantised, stated, _) in FORMATS.items():
        write_large(tmp_path / name, quantised, stated)
    line = [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in FORMATS)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wrong = {}
    for name, peak in json.loads(done.stdout).items():
        bits = FORMATS[name.rsplit("/", 1)[1]][2]
        weights, layer = int(LAYERS * LAYER * bits / 8), 4 * LAYER
        print(f"{name}: peak {peak >> 20} MiB, weights {weights >> 20} MiB, a layer in float32 {layer >> 20} MiB")
        if not 0.8 * weights < peak < weights + layer + SLACK:
            wrong[name] = peak >> 20
    assert not wrong
