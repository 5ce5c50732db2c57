"""The bits of a model's weights in memory, as jobs hold them: of its checkpoint, or of what they are rounded to."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from pathlib import Path

from hpcdecode.errors import UserError
from hpcdecode.planning.model_size import WeightBits

_log = logging.getLogger(__name__)
_HEAD, _LAYERS, _EXPERTS = "head", "layers", "experts"


def weight_bits(model: str, weights: str | None) -> WeightBits:
    """Return the bits of weights under `--weights` of generate, without reading them.

    Of a model without weights, or with some of their files, all matrices of layers are in few bits: config.json is
    enough for a plan.

    Args:
        model: Directory or GGUF file.
        weights: bfloat16, one of QUANTISED, or auto or None for what the checkpoint has.
    """
    from hpcdecode.model.frontend.config import stated_config
    from hpcdecode.model.frontend.gguf.folder import model_folder
    from hpcdecode.model.run.split_model import AUTO
    from hpcdecode.model.run.weight_size import BITS

    name = None if weights == "bfloat16" else weights or AUTO
    try:
        found = _of_files(Path(model), name)
    except UserError as error:
        _log.warning("%s", error)
        found = {}
    if found:
        return WeightBits(**found, if_needed=name == AUTO)
    if name in BITS:
        return WeightBits(layers=BITS[name], experts=BITS[name])
    if name == AUTO and "quantization_config" in stated_config(model_folder(Path(model))):
        _log.warning(
            "%s: without the files of its weights those that config.json calls quantised count as bfloat16: give "
            "--weights int4, mxfp4, mxfp8 or fp8",
            model,
        )
    return WeightBits()


def _of_files(model: Path, name: str | None) -> dict[str, float]:
    """Return the bits by kind, by the headers of a checkpoint's files; nothing if there are none.

    Raises:
        UserError: If the checkpoint is incomplete or damaged.
    """
    import torch

    from hpcdecode.model.run.weight_size import held_tensors

    elements: dict[str, int] = defaultdict(int)
    bits: dict[str, float] = defaultdict(float)
    for tensor in held_tensors(model, torch.bfloat16, name):
        kind = _HEAD if tensor.whole else _EXPERTS if _of_experts(tensor.key, tensor.shape) else _LAYERS
        count = math.prod(tensor.shape)
        elements[kind] += count
        bits[kind] += count * tensor.bits
    return {kind: bits[kind] / count for kind, count in elements.items()}


def _of_experts(key: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor holds weights of routed experts: all of them, or an expert's own."""
    return ".experts." in key or len(shape) == 3
