"""The bits of a model's weights in memory, as jobs hold them: of its checkpoint, or of what they are rounded to."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from pathlib import Path

from hpcdecode.planning.model_size import ELEMENT_BYTES, WeightBits

_log = logging.getLogger(__name__)
_HEAD, _LAYERS, _EXPERTS = "head", "layers", "experts"


def weight_bits(model: str, weights: str | None) -> WeightBits:
    """Return the bits of weights under `--weights` of generate, without reading them.

    Of a model without weights, of which config.json is enough for a plan, all matrices of layers are in few bits.

    Args:
        model: Directory or GGUF file.
        weights: One of WEIGHTS, or None for auto.

    Raises:
        UserError: If the checkpoint is incomplete or damaged.
    """
    import torch

    from hpcdecode.config import DTYPES
    from hpcdecode.model.frontend.config import stated_config
    from hpcdecode.model.frontend.gguf.folder import model_folder
    from hpcdecode.model.run.split_model import AUTO
    from hpcdecode.model.run.weight_size import BITS, held_tensors

    name = None if weights in DTYPES else weights or AUTO
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # of elements and of their bits
    for tensor in held_tensors(Path(model), torch.bfloat16, name):
        kind = _HEAD if tensor.whole else _EXPERTS if _of_experts(tensor.key, tensor.shape) else _LAYERS
        count = math.prod(tensor.shape)
        sums[kind][0] += count
        sums[kind][1] += count * tensor.bits
    if sums:
        return WeightBits(**{kind: bits / count for kind, (count, bits) in sums.items()}, if_needed=name == AUTO)
    if name in BITS:
        return WeightBits(layers=BITS[name], experts=BITS[name])
    if name == AUTO and "quantization_config" in stated_config(model_folder(Path(model))):
        _log.warning(
            "%s has no weights, so those that its config.json calls quantised count as bfloat16 (%d bits): give "
            "--weights int4, mxfp4, mxfp8 or fp8",
            model,
            8 * ELEMENT_BYTES,
        )
    return WeightBits()


def _of_experts(key: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor holds weights of routed experts: all of them, or an expert's own."""
    return ".experts." in key or len(shape) == 3
