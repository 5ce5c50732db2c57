"""AutoRound (Intel): integers packed as GPTQ or AWQ packs them, some modules in another number of bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcdecode.model.frontend.quantization.compressed import pattern_of
from hpcdecode.model.frontend.quantization.formats import WeightFormat
from hpcdecode.model.frontend.quantization.gptq import Awq, Gptq
from hpcdecode.model.frontend.quantization.scheme import (
    FormatRule,
    Stated,
    UnknownSchemeError,
    allowed,
    everywhere,
    size,
)

SPECIAL = frozenset("*+?[](){}^$|\\")  # what makes a name a pattern
MOST_BITS = 8  # modules of more are not quantised


def auto_round(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of what AutoRound states; modules that `extra_config` names come first."""
    packing = str(stated.get("packing_format") or stated.get("backend") or "")
    make = of_awq if "awq" in packing else of_gptq if "gptq" in packing else None
    if make is None:
        raise UnknownSchemeError(
            f"expected packing_format to be auto_round:auto_gptq or auto_round:auto_awq, got {packing!r:.100}"
        )
    extra = stated.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(own, dict) for own in extra.values()):
        raise UnknownSchemeError(f"expected extra_config to be an object of objects, got {extra!r:.100}")
    own = (FormatRule(matcher(name), formats_of({**stated, **values}, make)) for name, values in extra.items())
    return (*own, *everywhere(*formats_of(stated, make)))


def matcher(name: str) -> Callable[[str], bool]:
    """Return what tells whether a module has a name, which may be a pattern."""
    if not SPECIAL & set(name):
        return name.__eq__
    pattern = pattern_of(name)
    return lambda module: pattern.match(module) is not None


def formats_of(stated: Stated, make: Callable[[Stated], WeightFormat]) -> tuple[WeightFormat, ...]:
    """Return the formats of modules; none if they are not quantised."""
    bits = stated.get("bits")
    if type(bits) is int and bits > MOST_BITS:
        return ()
    allowed(stated, "data_type", "int", default="int")
    return (make(stated),)


def of_gptq(stated: Mapping[str, Any]) -> WeightFormat:
    """Return the format of weights that are packed as version 1 of GPTQ."""
    bits = allowed(stated, "bits", 2, 3, 4, 8)
    return Gptq(name=f"AutoRound, {bits} bits", bits=bits, group_size=size(stated, "group_size", whole=-1))


def of_awq(stated: Mapping[str, Any]) -> WeightFormat:
    """Return the format of weights that are packed as AWQ."""
    bits = allowed(stated, "bits", 4)
    return Awq(name="AutoRound, as AWQ", bits=bits, group_size=size(stated, "group_size", whole=-1))
