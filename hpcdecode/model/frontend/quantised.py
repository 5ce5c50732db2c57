"""Refuse checkpoints of quantised weights, which would be read as plain numbers, without their scales."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from hpcdecode.model.frontend.checkpoint import StoredTensor
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.stated import quantised

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # safetensors' names

# Last part of the names of tensors that hold quantised weights or their scales, wherever they are.
CODES = re.compile(
    r"qweight|qzeros?|g_idx|absmax|quant_map|nested_(absmax|quant_map)|quant_state.*|bitsandbytes__.*|SCB|W_q"
    r"|codes|codebooks|scale_inv|zero_point"
    r"|weight_(scale\w*|shape|zero_point|g_idx|packed|quantizer\w*)"
    r"|\w*_(packed|blocks|scale_inv|zero_point|absmax)|(input|output|act|activation)_(scales?|zero_point)"
)
# These are refused only beside a weight of the model: vision towers have a `logit_scale`, for one.
SCALES = re.compile(r"(\w*_)?(scales?|zeros?)(_\w+)?")


def refuse_quantised(tensors: Mapping[str, StoredTensor], sources: Sources, wanted: Mapping[str, Meta]) -> None:
    """Raise UserError if tensors of a checkpoint are quantised, as far as their names and dtypes tell.

    Args:
        tensors: Tensors of the checkpoint, by key.
        sources: Tensors that make up each weight.
        wanted: Shape and dtype of the model's weights, by name.
    """
    used = dict(sources.uses())
    modules = {key.rpartition(".")[0] for key in used} | used.keys()
    for key in sorted(tensors.keys() - used.keys()):
        module, _, name = key.rpartition(".")
        if CODES.fullmatch(name) or (module in modules and SCALES.fullmatch(name)):
            raise quantised(tensors[key].file, f"tensor {key!r} is not the model's and named as quantisation data")
    dtypes = {sources.ties.get(name, name): about.dtype for name, about in wanted.items()}
    for key, name in used.items():
        stored = tensors[key].dtype
        if stored not in FLOATS and dtypes.get(name, torch.float32).is_floating_point:
            raise quantised(tensors[key].file, f"tensor {key!r} has dtype {stored}")
