"""Checkpoints of ModelOpt, whose scheme may be in hf_quant_config.json alone: by their written formats.

ModelOpt needs dozens of packages. Where it is installed its own NVFP4 weights are read, too.
"""

from __future__ import annotations

import re

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.quantization.grids import FP4_VALUES
from hpcdecode.model.frontend.quantization.scheme import modelopt_formats
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.quantised import PROJECTIONS, check, edit, forms, kept, pair

EXPERTS_AND_PROJECTIONS = re.compile(r".*(experts\.\d+\.w\d|[qkvo]_proj)\.weight")
UP = "model.layers.1.mlp.up_proj.weight"
FILE = "hf_quant_config.json"


def fp8(stem, weight):
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def fp8_channels(stem, weight):
    scale = weight.abs().amax(1) / 448
    codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]


def nvfp4(stem, weight):
    """Two numbers in a byte, the first in its lower half; a scale for 16, in units of one for all."""
    overall = weight.abs().max() / (6 * 448)
    blocks = weight.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(2) / 6 / overall).to(torch.float8_e4m3fn)
    wide = (scale.float() * overall)[..., None]
    table = torch.tensor(FP4_VALUES)
    codes = (blocks / wide)[..., None].sub(table).abs().argmin(-1).flatten(1)
    stored = {"weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": scale}
    own = {**stored, "weight_scale_2": overall, "input_scale": torch.tensor(0.5)}
    return own, (table[codes].unflatten(1, (-1, 16)) * wide).flatten(1)


def mxfp8(stem, weight):
    blocks = weight.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(2) / 448).log2().ceil()
    codes = (blocks / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    own = {"weight": codes.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return own, (codes.float() * exponents.exp2()[..., None]).flatten(1)


def stated(algorithm, **values):
    own = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **values}
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": own}


KEPT = {"FP8": "f8", "FP8_PER_CHANNEL_PER_TOKEN": "f8", "NVFP4": "nvfp4", "MXFP8": "mx8"}
ALGORITHMS = {"FP8": fp8, "FP8_PER_CHANNEL_PER_TOKEN": fp8_channels, "NVFP4": nvfp4, "MXFP8": mxfp8}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_file_of_its_own(algorithm, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, ALGORITHMS[algorithm], stated(algorithm), under=FILE)
    caches = {f"model.layers.{i}.self_attn.{n}_proj.{n}_scale": torch.ones(()) for i in range(3) for n in "kv"}
    edit(made.quantised, lambda t: t.update(caches))
    check(made)
    assert kept(made.quantised, "bfloat16") == {KEPT[algorithm], None}


@pytest.mark.parametrize(("name", "chosen"), [("llama2", PROJECTIONS), ("mixtral", EXPERTS_AND_PROJECTIONS)])
def test_nvfp4_stays_so(name, chosen, checkpoint, tmp_path):
    """In whole weights, in experts of a tensor each, and in the parts of S-ranks that share a layer."""
    made = pair(checkpoint(name), tmp_path, nvfp4, stated("NVFP4"), chosen, under=FILE)
    check(made)
    assert kept(made.quantised, "float32") == kept(made.quantised, "bfloat16") == {"nvfp4", None}
    assert weight_bytes(made.quantised, torch.bfloat16, "auto") < weight_bytes(made.quantised, torch.bfloat16)
    for member in range(2):
        part = load_split(made.quantised, dtype="float32", quantised="auto", part=ModelPart(2, member))
        assert "nvfp4" in forms(part)


def test_in_config_json_too(checkpoint, tmp_path):
    own = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "config_groups": {"group_0": {}}}
    made = pair(checkpoint("llama2"), tmp_path, nvfp4, own)
    check(made)
    (made.quantised / FILE).write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    check(made)


def test_formats_by_module(checkpoint, tmp_path):
    modules = [
        f"model.layers.{i}.{m}_proj" for i in range(3) for m in ("mlp.up", "mlp.down", "mlp.gate", "self_attn.q")
    ]
    modules += [f"model.layers.{i}.self_attn.{m}_proj" for i in range(3) for m in "kvo"]
    layers = {m: {"quant_algo": "FP8" if "up" in m else "NVFP4", "group_size": 16} for m in modules}

    def quantise(stem, weight):
        return (fp8 if "up" in stem else nvfp4)(stem, weight)

    made = pair(
        checkpoint("llama2"), tmp_path, quantise, stated("MIXED_PRECISION", quantized_layers=layers), under=FILE
    )
    check(made)


def test_only_the_cache_is_quantised(checkpoint, tmp_path):
    check(
        pair(
            checkpoint("llama2"), tmp_path, lambda stem, weight: ({"weight": weight}, weight), stated(None), under=FILE
        )
    )


def test_weights_that_the_tool_packs():
    """The tool unpacks to the scale of the weight's dtype, float32."""
    tool = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    weight = torch.randn(96, 64)
    packed, scale, overall = tool.quantize(weight, 16)
    (form,) = modelopt_formats({"quant_algo": "NVFP4"})
    parts = {"codes": packed._quantized_data, "scale": scale, "overall": overall}
    got = form.rows(form.prepared(parts, (96, 64)), 0, 96)
    expected = packed.dequantize(dtype=torch.float32, scale=scale, double_scale=overall, block_sizes={-1: 16})
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


FAULTS = {
    "no scale": ("NVFP4", lambda t: t.pop(f"{UP}_scale"), r"\(NVFP4\): expected a tensor '.*weight_scale' beside it"),
    "no overall scale": ("NVFP4", lambda t: t.pop(f"{UP}_scale_2"), "expected a tensor '.*weight_scale_2' beside it"),
    "overall scales": (
        "NVFP4",
        lambda t: t.update({f"{UP}_scale_2": torch.ones(128)}),
        r"expected one scale of shape \[\] or \[1\], got \[128\]",
    ),
    "NaN": ("NVFP4", lambda t: t[f"{UP}_scale_2"].fill_(torch.nan), "expected a scale of the weight that are finite"),
    "FP8 without scale": (
        "FP8",
        lambda t: t.pop(f"{UP}_scale"),
        r"\(ModelOpt FP8\): expected a tensor '.*_scale'",
    ),
    "FP8 of channels": (
        "FP8",
        lambda t: t.update({f"{UP}_scale": torch.ones(128)}),
        r"expected scales of shape \[1, 1\] or \[1\] or \[\], got \[128\]",
    ),
    "another algorithm": (
        "FP8",
        lambda t: t.update({UP: t[UP].view(torch.uint8)}),
        "up_proj.input_scale', which is named as",
    ),
    "activations that are scaled": (
        "NVFP4",
        lambda t: t.update({UP.replace("weight", "pre_quant_scale"): torch.ones(64)}),
        "pre_quant_scale', which is named as quantisation data",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(name, checkpoint, tmp_path):
    algorithm, change, message = FAULTS[name]
    made = pair(checkpoint("llama2"), tmp_path, ALGORITHMS[algorithm], stated(algorithm), under=FILE)
    edit(made.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


@pytest.mark.parametrize(
    "own", [{"group_size": 32}, {"quant_algo": "W4A8_AWQ"}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": 3}]
)
def test_algorithms_that_are_not_known_are_refused(own, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, nvfp4, {"quantization": {"quant_algo": "NVFP4", **own}}, under=FILE)
    with pytest.raises(UserError, match=rf"{FILE}: .*quantised by modelopt .*, where expected {list(own)[-1]}"):
        load_split(made.quantised, dtype="float32")
