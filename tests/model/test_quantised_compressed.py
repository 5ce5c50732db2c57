"""Checkpoints that compressed-tensors packs, in every format that is read; it packs and unpacks them itself here."""

from __future__ import annotations

import re

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.quantised import check, edit, kept, pair, state

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

UP = "model.layers.1.mlp.up_proj.weight"


def args(**values):
    return QuantizationArgs(**values)


def amounts(weight, about):
    """Scales and zero points of a weight, and the scale of all of it, by the package."""
    size = {"group": about.group_size, "tensor_group": about.group_size}.get(about.strategy)
    overall = None
    if about.strategy == "tensor":
        least, most = weight.min().reshape(1), weight.max().reshape(1)
    elif about.strategy == "block":
        rows, columns = about.block_structure
        grid = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        grid = grid.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        least, most = grid.amin((1, 3)), grid.amax((1, 3))
    else:
        grid = weight.unflatten(1, (-1, size or weight.shape[1]))
        least, most = grid.amin(2), grid.amax(2)
    if about.strategy == "tensor_group":
        overall = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(least, most, about, global_scale=overall)
    return {"weight_scale": scale, "weight_zero_point": zero} | (
        {} if overall is None else {"weight_global_scale": overall}
    )


def packer(form, about):
    scheme = QuantizationScheme(targets=["Linear"], weights=about, format=form)
    tool = BaseCompressor.get_value_from_registry(form)

    def quantise(stem, weight):
        own = tool.compress({"weight": weight, **amounts(weight, about)}, scheme)
        if about.strategy == "tensor_group":  # the tool unpacks to bfloat16
            codes = unpack_fp4_from_uint8(own["weight_packed"], *weight.shape, dtype=torch.float32)
            overall = own["weight_global_scale"]
            return own, dequantize(codes, own["weight_scale"].float(), args=about, global_scale=overall)
        return own, tool.decompress(own, scheme)["weight"].float()

    return quantise


def stated(form, about, **group):
    own = {"targets": ["Linear"], "weights": about.model_dump(), "input_activations": None, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": own},
        "ignore": ["lm_head"],
    }


INT4 = dict(num_bits=4, type="int")
FORMATS = {
    "int4 groups": ("pack-quantized", args(**INT4, strategy="group", group_size=32)),
    "int4 groups, zero points": ("pack-quantized", args(**INT4, strategy="group", group_size=32, symmetric=False)),
    "int4 channels, zero points": ("pack-quantized", args(**INT4, strategy="channel", symmetric=False)),
    "int8 channels, packed": ("pack-quantized", args(num_bits=8, type="int", strategy="channel")),
    "int8 channels": ("int-quantized", args(num_bits=8, type="int", strategy="channel")),
    "int8 tensor": ("int-quantized", args(num_bits=8, type="int", strategy="tensor")),
    "int8 channels, zero points": (
        "naive-quantized",
        args(num_bits=8, type="int", strategy="channel", symmetric=False),
    ),
    "FP8 tensor": ("float-quantized", args(num_bits=8, type="float", strategy="tensor")),
    "FP8 channels": ("float-quantized", args(num_bits=8, type="float", strategy="channel")),
    "FP8 blocks": ("float-quantized", args(num_bits=8, type="float", strategy="block", block_structure=[32, 16])),
    "FP8 naive": ("naive-quantized", args(num_bits=8, type="float", strategy="channel")),
    "NVFP4": (
        "nvfp4-pack-quantized",
        args(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn),
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        args(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    ),
    "MXFP8": (
        "mxfp8-quantized",
        args(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    ),
    **{
        f"int{bits} groups": ("pack-quantized", args(num_bits=bits, type="int", strategy="group", group_size=32))
        for bits in (2, 3, 6)
    },
    "int5 channels, zero points": (
        "pack-quantized",
        args(num_bits=5, type="int", strategy="channel", symmetric=False),
    ),
}
if hasattr(CompressionFormat, "mxfp6_pack_quantized"):  # not in older releases
    about = args(num_bits=6, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    FORMATS["MXFP6"] = ("mxfp6-pack-quantized", about)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_unpacked_model(name, checkpoint, tmp_path):
    form, about = FORMATS[name]
    check(pair(checkpoint("llama2"), tmp_path, packer(form, about), stated(form, about)))


KEPT = {
    "int8 channels, packed": "Q8_0",
    "int8 channels": "Q8_0",
    "int8 tensor": "Q8_0",
    "int4 groups": "int4",
    "int4 groups, zero points": "int4",
    "int4 channels, zero points": "int4",
    "FP8 tensor": "fp8",
    "FP8 channels": "fp8",
    "FP8 naive": "fp8",
    "MXFP4": "mxfp4",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_in_few_bits_where_these_hold_them(name, dtype, checkpoint, tmp_path):
    """Their scales are float16: what a model of 16 bits has. The LM head was not quantised."""
    form, about = FORMATS[name]
    whole = packer(form, about)

    def quantise(stem, weight):
        stored, values = whole(stem, weight)
        half = {k: v.half() if k == "weight_scale" and v.dtype == torch.float32 else v for k, v in stored.items()}
        return half, values

    made = pair(checkpoint("llama2"), tmp_path, quantise, stated(form, about))
    form = KEPT.get(name)
    assert kept(made.quantised, dtype) == {form if form in (None, "Q8_0") else f"{form} grid", None}


def test_scales_that_float16_does_not_hold(checkpoint, tmp_path):
    for name in ("int4 groups", "int8 channels"):
        form, about = FORMATS[name]
        made = pair(checkpoint("llama2"), tmp_path / name, packer(form, about), stated(form, about))
        assert kept(made.quantised, "float32") == {None}


@pytest.mark.parametrize(("least", "forms"), [(1.0, {"Q8_0", None}), (2.0**-20, {None})])
def test_int8_with_scales_in_bfloat16(least, forms, checkpoint, tmp_path):
    """Which float16 holds unless they are tiny."""
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


FAULTS = {
    "no scale": ("int4 groups", lambda t: t.pop(f"{UP}_scale"), "expected a tensor '.*up_proj.weight_scale' beside it"),
    "no shape": ("int4 groups", lambda t: t.pop(f"{UP}_shape"), "expected a tensor '.*up_proj.weight_shape' beside it"),
    "no zero points": (
        "int4 groups, zero points",
        lambda t: t.pop(f"{UP}_zero_point"),
        "expected a tensor '.*up_proj.weight_zero_point' beside it",
    ),
    "zero points too many": (
        "int4 groups",
        lambda t: t.update({f"{UP}_zero_point": torch.zeros(16, 2).int()}),
        "weight_zero_point', which is named as quantisation data",
    ),
    "shape": (
        "int4 groups",
        lambda t: t[f"{UP}_shape"].mul_(2),
        r"expected codes of shape \[256, 16\], got \[128, 8\]",
    ),
    "no shape at all": (
        "int4 groups",
        lambda t: (
            t.update({f"{UP}_packed": torch.zeros(128, 0).int()}),
            t[f"{UP}_shape"].copy_(torch.tensor([128, -7])),
        ),
        r"expected a matrix or a stack of matrices, got the shape \[128, -7\]",
    ),
    "another shape": (
        "int4 groups",
        lambda t: t[f"{UP}_shape"].copy_(torch.tensor([-1, 64])),
        r"expected codes of shape \[-1, 8\], got",
    ),
    "group size": (
        "int4 groups",
        lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale"].repeat(1, 2)}),
        r"expected scales of shape \[128, 2\], got \[128, 4\]",
    ),
    "infinite scale": (
        "int4 groups",
        lambda t: t[f"{UP}_scale"][3].fill_(torch.inf),
        "expected scales that are finite",
    ),
    "no overall scale": (
        "NVFP4",
        lambda t: t.pop(f"{UP}_global_scale"),
        "expected a tensor '.*global_scale' beside it",
    ),
    "overall scale is zero": ("NVFP4", lambda t: t[f"{UP}_global_scale"].zero_(), "expected scales that are finite"),
    "scales in float32": (
        "NVFP4",
        lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale"].float()}),
        "expected scales in F8_E4M3, got F32",
    ),
    "gaps, as of older releases": (
        "int3 groups",
        lambda t: t.update({f"{UP}_packed": torch.zeros(128, 7).int()}),
        "expected codes of 3 bits without gaps, as compressed-tensors 0.20 packs them",
    ),
    "bytes of FP6": (
        "MXFP6",
        lambda t: t.update({f"{UP}_packed": t[f"{UP}_packed"][:, :47]}),
        "expected codes in a multiple of 3 bytes, got 47",
    ),
    "channel scales": (
        "FP8 channels",
        lambda t: t.update({f"{UP}_scale": torch.ones(1)}),
        r"expected scales of shape \[128, 1\] or \[128\], got \[1\]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(name, checkpoint, tmp_path):
    kind, change, message = FAULTS[name]
    if kind not in FORMATS:
        pytest.skip(f"this release of compressed-tensors does not pack {kind}")
    made = pair(checkpoint("llama2"), tmp_path, packer(*FORMATS[kind]), stated(*FORMATS[kind]))
    edit(made.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


REFUSED = {
    "bits": ({"num_bits": 1}, "num_bits to be one of 2, 3, 4, 5, 6, 7, 8, got 1"),
    "type": ({"type": "float"}, "type to be one of 'int', got 'float'"),
    "strategy": ({"strategy": "token"}, "strategy to be one of 'tensor', .* got 'token'"),
    "no strategy": ({"strategy": None}, "strategy to be one of 'tensor', .* got ''"),
    "group size": ({"group_size": -5}, "group_size to be a positive integer, got -5"),
    "zero point of all": ({"strategy": "tensor", "symmetric": False}, "zero points by channel or by group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_are_not_known_are_refused(name, checkpoint, tmp_path):
    change, message = REFUSED[name]
    form, about = FORMATS["int4 groups"]
    own = stated(form, about)
    own["config_groups"]["group_0"]["weights"].update(change)
    made = pair(checkpoint("llama2"), tmp_path, packer(form, about), own)
    with pytest.raises(UserError, match=rf"compressed-tensors \(format pack-quantized.*\), where .*{message}"):
        load_split(made.quantised, dtype="float32")
