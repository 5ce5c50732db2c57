"""What compressed-tensors packs: its formats, and its own packing and unpacking."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from tests.support.quantised import Pair, Stored, pair

UP = "model.layers.1.mlp.up_proj.weight"


def args(**values: object) -> QuantizationArgs:
    return QuantizationArgs(**values)


def amounts(weight: Tensor, about: QuantizationArgs) -> dict[str, Tensor]:
    """Return scales and zero points of a weight, and the scale of all of it, by the package."""
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


def packer(form: str, about: QuantizationArgs) -> Callable[[str, Tensor], Stored]:
    """Return what packs a weight, given its key and the weight, and says what it then stands for."""
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


def stated(form: str, about: QuantizationArgs, **group: object) -> dict[str, object]:
    """Return what config.json states of weights that are all packed alike."""
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


def packed(name: str, source: Path, folder: Path) -> Pair:
    """Pack the projections of a checkpoint in one of FORMATS."""
    form, about = FORMATS[name]
    return pair(source, folder, packer(form, about), stated(form, about))
