"""Quark (AMD): FP8 by tensor and by channel, and MXFP4, for all modules or by patterns of their names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from hpcdecode.model.frontend.quantization.compressed import MOST_PATTERN
from hpcdecode.model.frontend.quantization.formats import BYTES, CHANNEL, TENSOR, WeightFormat
from hpcdecode.model.frontend.quantization.grids import ScaledGrid
from hpcdecode.model.frontend.quantization.scheme import (
    FormatRule,
    Stated,
    UnknownSchemeError,
    allowed,
    everywhere,
    fp4_grid,
    refuse_stated,
)

SCALE = {"scale": ("{key}_scale",)}
MOST_STARS = 8
ROTATIONS = ("rotation", "rotate", "quarot", "spinquant")  # names of algorithms that change activations, too


def quark(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of what Quark states. Patterns of names come before what holds for all."""
    export = stated.get("export")
    allowed(export if isinstance(export, dict) else {}, "weight_format", "real_quantized", default="real_quantized")
    refuse_stated(stated, "layer_type_quant_config")
    algorithms = stated.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if any(word in str(algorithm).lower() for word in ROTATIONS):
            raise UnknownSchemeError("expected no rotation of activations in algo_config, got one")
    layers = stated.get("layer_quant_config") or {}
    if not isinstance(layers, dict):
        raise UnknownSchemeError(f"expected layer_quant_config to be an object, got {layers!r:.100}")
    own = tuple(FormatRule(matcher(name), formats_of(layer)) for name, layer in layers.items())
    return (*own, *everywhere(*formats_of(stated.get("global_quant_config"))))


def matcher(name: str) -> Callable[[str], bool]:
    """Return what tells whether a module has a name with wildcards; raise UnknownSchemeError if these are too many."""
    if len(name) > MOST_PATTERN or name.count("*") > MOST_STARS:
        raise UnknownSchemeError(f"expected a name of modules with at most {MOST_STARS} wildcards, got {name!r:.100}")
    pattern = re.compile(fnmatch.translate(name))
    return lambda module: pattern.match(module) is not None


def formats_of(layer: object) -> tuple[WeightFormat, ...]:
    """Return the formats of weights of modules; none if they are not quantised."""
    weight = layer.get("weight") if isinstance(layer, dict) else layer
    if isinstance(weight, list) and len(weight) == 1:
        (weight,) = weight
    if weight is None or weight == {}:
        return ()
    if not isinstance(weight, dict):
        raise UnknownSchemeError(f"expected weights of one data type, got {weight!r:.100}")
    if allowed(weight, "dtype", "fp8_e4m3", "fp4") == "fp4":
        allowed(weight, "qscheme", "per_group", default="per_group")
        allowed(weight, "group_size", 32)
        allowed(weight, "scale_format", "e8m0")
        return (fp4_grid("MXFP4", 32, BYTES | {"F8_E8M0"}, SCALE, ending="weight"),)
    block = TENSOR if allowed(weight, "qscheme", "per_tensor", "per_channel") == "per_tensor" else CHANNEL
    allowed(weight, "ch_axis", None, 0)
    return (ScaledGrid(name="Quark FP8", block=block, needed=SCALE, ending="weight", plain_ending="weight"),)
