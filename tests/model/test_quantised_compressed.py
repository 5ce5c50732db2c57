"""Checkpoints that compressed-tensors packs, in every format that is read; it packs and unpacks them itself here."""

from __future__ import annotations

import re

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.quantised import check, edit, kept, pair, state

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from tests.support.compressed import FORMATS, UP, packed, packer, stated


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_unpacked_model(name, checkpoint, tmp_path):
    check(packed(name, checkpoint("llama2"), tmp_path))


KEPT = {
    "int8 channels, packed": "Q8_0",
    "int8 channels": "Q8_0",
    "int8 tensor": "Q8_0",
    "int2 groups": "i4",
    "int3 groups": "i4",
    "int4 groups": "i4",
    "int4 groups, zero points": "i4",
    "int4 channels, zero points": "i4",
    "int5 channels, zero points": "Q8_0",
    "int6 groups": "Q8_0",
    "FP8 tensor": "f8",
    "FP8 channels": "f8",
    "FP8 naive": "f8",
    "MXFP4": "mx4",
    "MXFP6": "mx8",
    "MXFP8": "mx8",
    "NVFP4": "nvfp4",
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_in_few_bits_where_these_hold_them(name, checkpoint, tmp_path):
    """Their scales are float16: what a model of 16 bits has. The LM head was not quantised."""
    form, about = FORMATS[name]
    whole = packer(form, about)

    def quantise(stem, weight):
        stored, values = whole(stem, weight)
        half = {k: v.half() if k == "weight_scale" and v.dtype == torch.float32 else v for k, v in stored.items()}
        return half, values

    made = pair(checkpoint("llama2"), tmp_path, quantise, stated(form, about))
    form = KEPT.get(name)
    for dtype in ("float32", "bfloat16"):
        assert kept(made.quantised, dtype) == {form, None}


def test_scales_that_float16_does_not_hold(checkpoint, tmp_path):
    for name, form in (("int4 groups", None), ("int8 channels", "i8")):
        assert kept(packed(name, checkpoint("llama2"), tmp_path / name).quantised, "float32") == {form, None}


@pytest.mark.parametrize(("least", "forms"), [(1.0, {"Q8_0", None}), (2.0**-20, {"i8", None})])
def test_int8_with_scales_in_bfloat16(least, forms, checkpoint, tmp_path):
    """Which float16 holds unless they are tiny; then float32 does."""
    form, about = FORMATS["int8 channels"]

    def quantise(stem, weight):
        own, _ = packer(form, about)(stem, weight)
        scale = own["weight_scale"].bfloat16()
        scale[0] *= least
        own["weight_scale"] = scale
        return own, own["weight"].float() * scale.float()

    assert kept(pair(checkpoint("llama2"), tmp_path, quantise, stated(form, about)).quantised, "bfloat16") == forms


def test_experts_are_packed_one_by_one(checkpoint, tmp_path):
    form, about = FORMATS["int4 groups"]
    experts = re.compile(r".*(experts\.\d+\.w\d|[qkvo]_proj)\.weight")
    check(pair(checkpoint("mixtral"), tmp_path, packer(form, about), stated(form, about), experts))


def test_as_older_releases_state_it(checkpoint, tmp_path):
    """Under compression_config, or in an object of their own beside one on sparsity."""
    form, about = FORMATS["FP8 channels"]
    own = stated(form, about)
    made = pair(checkpoint("llama2"), tmp_path, packer(form, about), own, under="compression_config")
    check(made)
    state(made.quantised, {"quantization_config": own, "sparsity_config": {"format": "dense"}}, "compression_config")
    check(made)


def test_groups_of_modules_have_formats_of_their_own(checkpoint, tmp_path):
    """Names and patterns come before the class. Modules to ignore, and those of no group, are plain."""
    int4, int8 = FORMATS["int4 groups"], FORMATS["int8 channels"]
    own = stated("mixed-precision", int8[1])
    own["config_groups"]["group_0"]["format"] = "int-quantized"
    down = {"targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"], "weights": int4[1].model_dump()}
    own["config_groups"]["group_1"] = {**down, "format": "pack-quantized"}
    own["ignore"] += ["re:.*self_attn.*", "LlamaRMSNorm"]

    def quantise(stem, weight):
        packed = "down" in stem or stem == "model.layers.0.mlp.up_proj."
        return packer(*(int4 if packed else int8))(stem, weight)

    made = pair(checkpoint("llama2"), tmp_path, quantise, own, re.compile(r".*mlp.*proj\.weight"))
    check(made)
    own["ignore"] += ["model.layers.1.mlp.up_proj"]
    state(made.quantised, own)
    with pytest.raises(UserError, match=r"up_proj\.weight_scale', which is named as quantisation data"):
        load_split(made.quantised, dtype="float32")


def test_inputs_may_belong_to_any_group(checkpoint, tmp_path):
    """weight_g_idx, of releases that quantised inputs in the order of their activations: by the written format."""
    form, about = FORMATS["int4 groups, zero points"]

    def quantise(stem, weight):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        own, values = packer(form, about)(stem, weight[:, order])
        codes, _ = packer("naive-quantized", about)(stem, weight[:, order])
        back = order.argsort()
        own["weight_packed"] = pack_to_int32(codes["weight"][:, back].contiguous(), 4)
        own["weight_g_idx"] = (back // about.group_size).int()
        return own, values[:, back]

    made = pair(checkpoint("llama2"), tmp_path, quantise, stated(form, about))
    check(made)
    edit(made.quantised, lambda t: t[f"{UP}_g_idx"].fill_(-1))
    with pytest.raises(UserError, match="expected groups of inputs from 0 to 1, got -1 to -1"):
        load_split(made.quantised, dtype="float32")


def test_scales_of_activations_and_of_the_kv_cache_are_left_out(checkpoint, tmp_path):
    form, about = FORMATS["FP8 tensor"]

    def quantise(stem, weight):
        own, values = packer(form, about)(stem, weight)
        return {**own, "input_scale": torch.ones(1), "output_scale": torch.ones(1)}, values

    made = pair(checkpoint("llama2"), tmp_path, quantise, stated(form, about))
    edit(made.quantised, lambda t: t.update({f"model.layers.1.self_attn.{n}_scale": torch.ones(1) for n in "kv"}))
    check(made)
    edit(made.quantised, lambda t: t.update({"lm_head.input_scale": torch.ones(1)}))
    with pytest.raises(UserError, match=r"lm_head\.input_scale', which is named as quantisation data"):
        load_split(made.quantised, dtype="float32")
