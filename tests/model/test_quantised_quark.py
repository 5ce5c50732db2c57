"""Checkpoints of Quark, by their written format: the tool takes GPUs and a torch of its own."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.quantization.grids import FP4_VALUES
from tests.support.quantised import check, edit, kept, pair, state

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "group_size": None, "ch_axis": None}
CHANNELS = {**FP8, "qscheme": "per_channel", "ch_axis": 0}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}


def fp8(stem, weight, dims=(0, 1)):
    scale = weight.abs().amax(dims) / 448
    wide = scale if scale.ndim == 0 else scale[:, None]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * wide


def channels(stem, weight):
    return fp8(stem, weight, 1)


def mxfp4(stem, weight):
    """Two numbers in a byte, the first in its lower half, with an exponent for 32."""
    blocks, table = weight.unflatten(1, (-1, 32)), torch.tensor(FP4_VALUES)
    exponents = (blocks.abs().amax(2) / 6).log2().ceil()
    wide = exponents.exp2()[..., None]
    codes = (blocks / wide)[..., None].sub(table).abs().argmin(-1).flatten(1)
    own = {"weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": (exponents + 127).byte()}
    return own, (table[codes].unflatten(1, (-1, 32)) * wide).flatten(1)


def stated(weight, **values):
    """As it is in the config.json of its checkpoints, without what does not concern weights."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": weight, "bias": None, "output_tensors": None},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "algo_config": None,
        **values,
    }


@pytest.mark.parametrize(
    ("weight", "quantise", "form"),
    [(FP8, fp8, "f8"), (CHANNELS, channels, "f8"), (MXFP4, mxfp4, "mx4")],
    ids=["FP8", "FP8 channels", "MXFP4"],
)
def test_logits_and_what_stays_packed(weight, quantise, form, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, quantise, stated(weight))
    check(made)
    assert kept(made.quantised, "bfloat16") == {form, None}


def test_modules_by_pattern(checkpoint, tmp_path):
    """Some in another data type, or not quantised; AWQ's scales are merged before."""
    layers = {"*.mlp.up_proj": {"weight": CHANNELS}, "*layers.1.self_attn*": {"weight": None}}

    def quantise(stem, weight):
        if "layers.1.self_attn" in stem:
            return {"weight": weight}, weight
        return (channels if "up_proj" in stem else mxfp4)(stem, weight)

    check(
        pair(
            checkpoint("llama2"),
            tmp_path,
            quantise,
            stated(MXFP4, layer_quant_config=layers, algo_config=[{"name": "awq"}]),
        )
    )


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (stated({**MXFP4, "dtype": "fp6_e2m3"}), "expected dtype to be one of 'fp8_e4m3', 'fp4', got 'fp6_e2m3'"),
        (stated({**FP8, "dtype": "int4"}), "got 'int4'"),
        (stated({**FP8, "qscheme": "per_group"}), "expected qscheme to be one of 'per_tensor', 'per_channel', got"),
        (stated({**MXFP4, "group_size": 16}), "expected group_size to be one of 32, got 16"),
        (stated([FP8, MXFP4]), "expected weights of one data type"),
        (stated(FP8, algo_config=[{"name": "rotation", "online": True}]), "expected no rotation of activations"),
        (stated(FP8, export={"weight_format": "fake_quantized"}), "expected weight_format to be one of"),
        (stated(FP8, layer_type_quant_config={"Linear": {}}), "expected no layer_type_quant_config"),
        (stated(FP8, layer_quant_config={"*" * 20: {}}), "at most 8 wildcards"),
        (stated(FP8, layer_quant_config=[1]), "expected layer_quant_config to be an object"),
    ],
)
def test_what_is_not_read_is_refused_by_name(own, message, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, fp8, stated(FP8))
    state(made.quantised, own)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


@pytest.mark.parametrize(
    ("weight", "quantise", "name", "shape"),
    [
        (FP8, fp8, "Quark FP8", r"\[1, 1\] or \[1\] or \[\], got \[3\]"),
        (CHANNELS, channels, "Quark FP8", r"\[128, 1\] or \[128\], got \[3\]"),
        (MXFP4, mxfp4, "MXFP4", r"\[128, 2\], got \[3\]"),
    ],
    ids=["FP8", "FP8 channels", "MXFP4"],
)
def test_scales_that_are_missing_or_of_another_shape_are_named(weight, quantise, name, shape, checkpoint, tmp_path):
    made, scale = (
        pair(checkpoint("llama2"), tmp_path, quantise, stated(weight)),
        "model.layers.1.mlp.up_proj.weight_scale",
    )
    edit(made.quantised, lambda tensors: tensors.update({scale: tensors[scale].new_ones(3)}))
    with pytest.raises(UserError, match=rf"up_proj\.weight' \(.*{name}.*\): expected scales of shape {shape}"):
        load_split(made.quantised, dtype="float32")
    edit(made.quantised, lambda tensors: tensors.pop(scale))
    with pytest.raises(
        UserError, match=rf"\(.*{name}.*\): expected a tensor '.*up_proj\.weight_scale' beside it, got none"
    ):
        load_split(made.quantised, dtype="float32")
