"""Data types of a model on a device, and the memory of its weights, before it is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from hpcdecode.attention.base import multiplies_bfloat16
from hpcdecode.attention.cuda import built
from hpcdecode.config import DTYPES, EngineOptions
from hpcdecode.errors import UserError
from hpcdecode.model.frontend.config import stated_dtype
from hpcdecode.model.lower.packed_weights import packs
from hpcdecode.model.run.load import parse_dtype
from hpcdecode.model.run.split_model import AUTO
from hpcdecode.model.run.weight_size import weight_bytes
from hpcdecode.ranks.team import WeightFacts

_MOST_OF_A_GPU = 0.85  # of its memory, for weights


def weight_facts(options: EngineOptions) -> WeightFacts:
    """Return what memory the weights take, by the headers of the checkpoint's files, and whether ranks share it.

    It is 0 where there are none: R-ranks need no checkpoint. What is wrong with one is told when it is loaded.
    """
    try:
        dtype = parse_dtype(options.dtype or auto_dtype(options.model), options.model)
        name = str(dtype).removeprefix("torch.")
        form = quantised(options, name, options.device or "cpu")
        form = None if form == AUTO and options.lora is not None else form  # merged weights are none of few bits
        nbytes = weight_bytes(Path(options.model), dtype, form, options.device or "cpu")
    except UserError:
        return WeightFacts()
    return WeightFacts(nbytes, options.device in (None, "cpu") and packs(dtype))


def quantised(options: EngineOptions, dtype: str, device: str) -> str | None:
    """Return what projections are quantised to, as `load_split` takes it.

    A checkpoint in few bits stays so on CPUs; on a GPU, where a step has to expand it, if it would not fit otherwise.

    Raises:
        UserError: If weights are to be of a dtype that activations are not of.
    """
    if options.weights in (None, AUTO):
        return AUTO if device == "cpu" or _exceeds(options, dtype, device) else None
    if options.weights in DTYPES:
        if options.weights != dtype:
            raise UserError(
                f"--weights {options.weights}: expected the data type of activations, {dtype}; "
                f"add --dtype {options.weights}, or leave it out"
            )
        return None
    return options.weights


def _exceeds(options: EngineOptions, dtype: str, device: str) -> bool:
    """Return whether a member's weights that are not in few bits take more than most of a GPU's memory."""
    if not (torch.cuda.is_available() and built()):
        return False
    most = _MOST_OF_A_GPU * torch.cuda.get_device_properties(device).total_memory
    whole = weight_bytes(Path(options.model), parse_dtype(dtype, options.model))
    return whole / ((options.tp or 1) * (options.pp or 1)) > most


def auto_dtype(model: str, device: str = "cpu") -> str:
    """Return bfloat16 for a 16-bit checkpoint on a GPU, or a CPU that multiplies bfloat16, else float32."""
    narrow = stated_dtype(model) in ("bfloat16", "float16")
    return "bfloat16" if narrow and (device != "cpu" or multiplies_bfloat16()) else "float32"
