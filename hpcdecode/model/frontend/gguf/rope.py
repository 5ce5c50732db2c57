"""How the rotary frequencies of a model in GGUF files are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcdecode.model.frontend.gguf.header import F32, GgufHeader
from hpcdecode.model.frontend.gguf.metadata import refused

ORIGINAL = 8192  # positions of Llama 3 and 4 whose frequencies are not scaled
LLAMA3 = ((1.0, 4.0), (1.0, 1.0))  # their low_freq_factor and high_freq_factor
UNROTATED = 1e29  # divisors of frequencies of elements that are not rotated are larger
FREQUENCIES = "rope_freqs.weight"  # divisors of rotary frequencies
YARN_VALUES = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}  # if stated


def rope_scaling(
    headers: Sequence[GgufHeader], values: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return how rotary frequencies are scaled; None if they are not.

    Raises:
        UserError: If they are scaled in a way that is not known.
    """
    kind, factor = values.get("rope.scaling.type", "none"), values.get("rope.scaling.factor")
    for header in headers:
        if entry := header.tensors.get(FREQUENCIES):
            data = np.memmap(header.file, mode="r")[entry.first : entry.first + entry.nbytes]
            divisors = data.view("<f4") if entry.type == F32 else data
            of_gemma = config.get("model_type") == "gemma4_text"
            return proportional(header, divisors) if of_gemma else llama3(header, divisors, config)
    if kind == "none" or factor in (None, 0, 1):
        return None
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf or kind not in ("linear", "yarn"):
        raise refused(headers[0], f"rotary frequencies scaled by linear or yarn, got {kind!r:.50} by {factor!r:.50}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    original = values.get("rope.scaling.original_context_length", config.get("max_position_embeddings"))
    stated = {config: values.get(f"rope.scaling.yarn_{name}") for name, config in YARN_VALUES.items()}
    stated = {name: value for name, value in stated.items() if value is not None}
    return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original, **stated}


def llama3(header: GgufHeader, divisors: np.ndarray[Any, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of Llama 3 or 4 that has these divisors of the frequencies.

    Source: `_compute_llama3_parameters` of transformers.

    Raises:
        UserError: If they are those of another scaling.
    """
    size, base = config.get("head_dim") or 0, config.get("rope_theta", 10000.0)
    factor = float(np.max(divisors, initial=0))
    if divisors.shape == (size // 2,) and 1 <= factor < math.inf and base > 1:
        turns = ORIGINAL / (2 * math.pi * base ** (np.arange(0, size, 2) / size))
        for low, high in LLAMA3:
            with np.errstate(divide="ignore", invalid="ignore"):
                smooth = np.clip((turns - low) / (high - low), 0, 1)
            if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
                own = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": ORIGINAL}
                return {"rope_type": "llama3", "factor": factor, **own}
    raise refused(header, f"divisors of rotary frequencies in {FREQUENCIES!r} as Llama 3 has them, got others")


def proportional(header: GgufHeader, divisors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the scaling of Gemma 4 that has these divisors: 1, and for elements that are not rotated large ones.

    Raises:
        UserError: If they are those of another scaling.
    """
    rotated = int(np.sum(divisors == 1))
    if divisors.ndim != 1 or not rotated or not np.all(divisors[rotated:] > UNROTATED):
        raise refused(header, f"divisors of rotary frequencies in {FREQUENCIES!r} that are 1 or more than {UNROTATED}")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}
