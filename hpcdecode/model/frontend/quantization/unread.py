"""Refuse checkpoints with quantised weights, or scales, that nothing would read."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.quantization.formats import FLOATS
from hpcdecode.model.frontend.quantization.scheme import Scheme
from hpcdecode.model.frontend.quantization.stated import refused
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.tensors import CheckpointTensor

# Last part of the names of tensors that hold quantised weights or their scales, wherever they are.
CODES = re.compile(
    r"qweight|qzeros?|g_idx|absmax|quant_map|nested_(absmax|quant_map)|quant_state.*|bitsandbytes__.*|SCB|W_q"
    r"|codes|codebooks|scale_inv|zero_point"
    r"|weight_(scale\w*|shape|zero_point|g_idx|packed|quantizer\w*)"
    r"|\w*_(packed|blocks|scale_inv|zero_point|absmax)|(input|output|act|activation)_(scales?|zero_point)"
)
PREDICTING = re.compile(r"(\w+\.)?mtp\..*")  # keys of layers that predict more tokens, which are not run
# If nothing is stated these are refused only beside a weight of the model: vision towers have a `logit_scale`, for one.
SCALES = re.compile(r"(\w*_)?(scales?|zeros?)(_\w+)?")


def refuse_unread(
    tensors: Mapping[str, CheckpointTensor], sources: Sources, wanted: Mapping[str, Meta], scheme: Scheme | None
) -> None:
    """Raise UserError if tensors are quantised, or scales, that nothing reads, as far as names and dtypes tell.

    Args:
        tensors: Tensors of the checkpoint by the keys that it would have unquantised.
        sources: Tensors that make up each weight.
        wanted: Shape and dtype of the model's weights, by name.
        scheme: What the checkpoint states of its quantised weights, or None.
    """
    used = dict(sources.uses())
    modules = {key.rpartition(".")[0] for key in used} | used.keys()
    states = "nothing states that" if scheme is None else f"{scheme.file.name} states {scheme.name} only"
    for key in sorted(tensors.keys() - used.keys()):
        module, _, name = key.rpartition(".")
        if PREDICTING.fullmatch(key):
            continue
        file = tensors[key].mapped.file
        if CODES.fullmatch(name) or ((module in modules or scheme is not None) and SCALES.fullmatch(name)):
            raise refused(file, f"tensor {key!r}, which is named as quantisation data ({states})")
        if scheme is not None and name == "bias" and module in modules and bool(tensors[key]().any()):
            raise refused(
                tensors[key].mapped.file, f"a bias {key!r}, which the model does not have"
            )  # zeros are left out
    dtypes = {sources.ties.get(name, name): about.dtype for name, about in wanted.items()}
    for key, name in used.items():
        stored = tensors[key].dtype
        if stored not in FLOATS and dtypes.get(name, torch.float32).is_floating_point:
            raise refused(tensors[key].mapped.file, f"tensor {key!r} in {stored} ({states})")
