"""compressed-tensors: groups of modules, each with a format of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcdecode.model.frontend.quantization.formats import BYTES, CHANNEL, INT8, TENSOR, ScaleBlock, WeightFormat
from hpcdecode.model.frontend.quantization.fp6 import Mxfp6
from hpcdecode.model.frontend.quantization.grids import FP8, PackedIntegers, ScaledGrid, fp8, integer
from hpcdecode.model.frontend.quantization.scheme import (
    FormatRule,
    Stated,
    UnknownSchemeError,
    allowed,
    block_of,
    fp4_grid,
    mxfp8_grid,
    nvfp4,
    refuse_stated,
    size,
)

CLASS = "Linear"  # the one class of modules whose weights are known here
MOST_PATTERN = 500  # characters
NESTED = re.compile(r"\([^()]*[*+{][^()]*\)[*+{]")  # a repeated repetition, which may take for ever to match
SCALE = {"scale": ("{key}_scale",)}


def compressed_tensors(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of what compressed-tensors states. Names come before patterns, and these before classes."""
    inner = stated.get("quantization_config")
    stated = inner if isinstance(inner, dict) else stated
    refuse_stated(stated, "transform_config")
    sparsity = stated.get("sparsity_config")
    allowed(sparsity if isinstance(sparsity, dict) else {"format": sparsity}, "format", "dense", default="dense")
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise UnknownSchemeError(f"expected config_groups to be an object of objects, got {groups!r:.100}")
    found = [(targets_of(known(texts(group, "targets"))), formats_of(group, stated)) for group in groups.values()]
    ignored = targets_of(texts(stated, "ignore"))
    rules = [[FormatRule(matches, formats) for matches in targets] for targets, formats in found]
    by_kind = [rule for kind in zip(*rules, strict=True) for rule in kind]
    return (*(FormatRule(matches, ()) for matches in ignored), *by_kind)


def texts(stated: Stated, name: str) -> list[str]:
    """Return a list of texts, [] if it is not stated; raise UnknownSchemeError if it is anything else."""
    found = stated.get(name) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UnknownSchemeError(f"expected {name} to be a list of texts, got {found!r:.100}")
    return found


def known(targets: list[str]) -> list[str]:
    """Return `targets`, or raise UnknownSchemeError if one is a class of modules other than projections."""
    for name in targets:
        if name != CLASS and not name.startswith("re:") and "." not in name and name[:1].isupper():
            raise UnknownSchemeError(f"expected modules by name, by pattern or of the class {CLASS}, got {name!r:.100}")
    return targets


class Targets(NamedTuple):
    """What tells whether a module is among some targets: by name, by a pattern, by its class."""

    named: Callable[[str], bool]
    matched: Callable[[str], bool]
    of_class: Callable[[str], bool]


def targets_of(targets: Sequence[str]) -> Targets:
    """Return what tells whether a module is among `targets`, names, patterns after "re:", or the class of projections.

    Raises:
        UnknownSchemeError: If one is no pattern that is safe to use.
    """
    patterns = [pattern_of(target) for target in targets if target.startswith("re:")]
    names = {target for target in targets if not target.startswith("re:")}
    return Targets(
        names.__contains__,
        lambda module: any(pattern.match(module) for pattern in patterns),
        lambda _: CLASS in names,
    )


def pattern_of(target: str) -> re.Pattern[str]:
    """Return the pattern of a target, or raise UnknownSchemeError."""
    pattern = target.removeprefix("re:")
    if len(pattern) > MOST_PATTERN or NESTED.search(pattern):
        raise UnknownSchemeError(f"expected a pattern of modules without nested repetitions, got {pattern!r:.100}")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise UnknownSchemeError(f"expected a pattern of modules, got {pattern!r:.100}: {e}") from e


def formats_of(group: Stated, stated: Stated) -> tuple[WeightFormat, ...]:
    """Return the formats of a group's weights; none if they are not quantised."""
    weights = group.get("weights")
    if weights is None:
        return ()
    if not isinstance(weights, dict):
        raise UnknownSchemeError(f"expected weights to be an object, got {weights!r:.100}")
    name = group.get("format") or stated.get("format")
    make = FORMATS.get(name) if isinstance(name, str) else None
    if make is None:
        raise UnknownSchemeError(f"expected format to be one of {', '.join(FORMATS)}, got {name!r:.100}")
    return (make(weights),)


def block_for(weights: Stated) -> ScaleBlock:
    """Return which elements share a scale."""
    strategy = allowed(weights, "strategy", "tensor", "channel", "group", "tensor_group", "block", default="")
    if strategy == "block":
        found = weights.get("block_structure")
        return block_of([int(n) for n in found.split("x") if n.isdigit()] if isinstance(found, str) else found)
    if strategy in ("tensor", "channel"):
        return TENSOR if strategy == "tensor" else CHANNEL
    return ScaleBlock(1, size(weights, "group_size", whole=0))


def packed(weights: Stated) -> WeightFormat:
    """Return the format pack-quantized."""
    allowed(weights, "type", "int")
    bits = allowed(weights, "num_bits", *range(2, 9))
    block = block_for(weights)
    asymmetric = not allowed(weights, "symmetric", True, False, default=True)
    if asymmetric and (block.rows != 1):
        raise UnknownSchemeError("expected zero points by channel or by group")
    needed = {**SCALE, "shape": ("{key}_shape",), **({"zero": ("{key}_zero_point",)} if asymmetric else {})}
    optional = {"group": ("{key}_g_idx",)}
    return PackedIntegers(name=f"pack-quantized, {bits} bits", block=block, needed=needed, optional=optional, bits=bits)


def plain(weights: Stated) -> WeightFormat:
    """Return the formats naive-quantized, int-quantized and float-quantized: int8 or FP8 as they are."""
    kind = allowed(weights, "type", "int", "float")
    bits = allowed(weights, "num_bits", *((4, 8) if kind == "int" else (8,)))
    asymmetric = not allowed(weights, "symmetric", *((True, False) if kind == "int" else (True,)), default=True)
    needed = {**SCALE, **({"zero": ("{key}_zero_point",)} if asymmetric else {})}
    return ScaledGrid(
        name=f"{kind}-quantized, {bits} bits",
        block=block_for(weights),
        needed=needed,
        dtypes=INT8 if kind == "int" else FP8,
        decoded=integer if kind == "int" else fp8,
        ending="weight",
        plain_ending="weight",
    )


def of_kind(kind: str) -> Callable[[Stated], WeightFormat]:
    """Return what makes the format `kind`-quantized."""

    def made(weights: Stated) -> WeightFormat:
        allowed(weights, "type", kind)
        return plain(weights)

    return made


def nvfp4_packed(weights: Stated) -> WeightFormat:
    """Return the format nvfp4-pack-quantized."""
    require_float(weights, 4, 16)
    return nvfp4({**SCALE, "overall": ("{key}_global_scale",)}, ending="_packed", exponent=-1)


def mxfp4_packed(weights: Stated) -> WeightFormat:
    """Return the format mxfp4-pack-quantized."""
    require_float(weights, 4, 32)
    return fp4_grid("MXFP4", 32, BYTES | {"F8_E8M0"}, SCALE, ending="_packed")


def mxfp8(weights: Stated) -> WeightFormat:
    """Return the format mxfp8-quantized."""
    require_float(weights, 8, 32)
    return mxfp8_grid(SCALE)


def mxfp6_packed(weights: Stated) -> WeightFormat:
    """Return the format mxfp6-pack-quantized."""
    require_float(weights, 6, 32)
    return Mxfp6(needed=SCALE)


def require_float(weights: Stated, bits: int, group: int) -> None:
    """Raise UnknownSchemeError unless `weights` are floats of so many bits with a scale for so many of a row."""
    allowed(weights, "type", "float")
    allowed(weights, "num_bits", bits)
    allowed(weights, "group_size", group)


FORMATS: dict[str, Callable[[Stated], WeightFormat]] = {
    "pack-quantized": packed,
    "naive-quantized": plain,
    "int-quantized": of_kind("int"),
    "float-quantized": of_kind("float"),
    "nvfp4-pack-quantized": nvfp4_packed,
    "mxfp4-pack-quantized": mxfp4_packed,
    "mxfp6-pack-quantized": mxfp6_packed,
    "mxfp8-quantized": mxfp8,
}
