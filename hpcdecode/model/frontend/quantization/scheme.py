"""What a checkpoint states of its quantised weights, and the table from that to their formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpcdecode.model.frontend.quantization.bitsandbytes import FourBits, Int8Rows
from hpcdecode.model.frontend.quantization.formats import (
    ANY_SCALES,
    BYTES,
    CHANNEL,
    INT8,
    TENSOR,
    ScaleBlock,
    Templates,
    WeightFormat,
)
from hpcdecode.model.frontend.quantization.gptq import Awq, Gptq
from hpcdecode.model.frontend.quantization.grids import FP8, Mxfp4Experts, ScaledGrid, fp4
from hpcdecode.model.frontend.tensors import CheckpointTensor

Stated = Mapping[str, Any]
# Last parts of keys of tensors that concern activations or the KV cache, which are not quantised here.
OF_ACTIVATIONS = frozenset(
    {"input_scale", "activation_scale", "input_global_scale", "input_scale_ub", "input_zero_point"}
    | {"output_scale", "output_zero_point"}
)
OF_KV_CACHE = frozenset({"kv_scale", "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point"})


class UnknownSchemeError(ValueError):
    """What a checkpoint states of its quantised weights is not understood. The text says what, and what is."""


class FormatRule(NamedTuple):
    """The formats that weights of some modules may have. The dtype of the codes tells which of them.

    Attributes:
        matches: Returns whether it concerns the module of a name.
        formats: The formats; none if these modules are not quantised.
    """

    matches: Callable[[str], bool]
    formats: tuple[WeightFormat, ...]


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are quantised.

    Attributes:
        file: File that states it.
        name: Its name in messages.
        rules: Formats of weights; the first rule that matches a module holds.
    """

    file: Path
    name: str
    rules: tuple[FormatRule, ...]

    def format_of(self, key: str, stored: CheckpointTensor) -> WeightFormat | None:
        """Return the format of the weight whose codes are `stored`; None if these are no codes."""
        module = key.rpartition(".")[0]
        for matches, formats in self.rules:
            if matches(module):
                return next((form for form in formats if form.holds(key, stored)), None)
        return None


def everywhere(*formats: WeightFormat) -> tuple[FormatRule, ...]:
    """Return rules by which all modules may have `formats`."""
    return (FormatRule(lambda _: True, formats),)


def allowed(stated: Stated, name: str, *values: object, default: object = None) -> Any:
    """Return the value of `name`, or `default` if it is not stated.

    Raises:
        UnknownSchemeError: If it is none of `values`.
    """
    found = stated.get(name)
    found = default if found is None else found
    if not any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in values):
        expected = ", ".join(repr(value) for value in values)
        raise UnknownSchemeError(f"expected {name} to be one of {expected}, got {found!r:.100}")
    return found


def refuse_stated(stated: Stated, *names: str) -> None:
    """Raise UnknownSchemeError if one of `names`, which change the model, is stated."""
    for name in names:
        if stated.get(name):
            raise UnknownSchemeError(f"expected no {name}, got {stated[name]!r:.100}")


def size(stated: Stated, *names: str, whole: object = None) -> int | None:
    """Return the positive integer under the first of `names` that is stated; None for `whole`, which means all.

    Raises:
        UnknownSchemeError: If it is anything else.
    """
    name = next((name for name in names if stated.get(name) is not None), names[0])
    found = stated.get(name)
    if found == whole:
        return None
    if type(found) is not int or found < 1:
        raise UnknownSchemeError(f"expected {name} to be a positive integer, got {found!r:.100}")
    return found


def block_of(found: object) -> ScaleBlock:
    """Return the block of [rows, columns]; raise UnknownSchemeError if `found` is anything else."""
    if isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found):
        return ScaleBlock(*found)
    raise UnknownSchemeError(f"expected a block of two positive integers, got {found!r:.100}")


def fp8(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of DeepSeek-V3's FP8 in blocks, of FP8 by tensor or by channel, and of DeepSeek-V4's experts.

    These are in FP4 if `expert_dtype` says so, with a power of two for 32 of a row, among weights in FP8.
    """
    blocks = stated.get("weight_block_size")
    block = None if blocks is None else block_of(blocks)
    scales = ANY_SCALES | (BYTES if stated.get("scale_fmt") == "ue8m0" else frozenset())
    name = "FP8" if block is None else f"FP8 in blocks of {block.rows} x {block.columns}"
    needed = {"scale": ("{key}_scale_inv", "{key}_scale", "{module}.scale")}
    weights = ScaledGrid(name=name, block=block, needed=needed, scale_dtypes=scales)
    if allowed(stated, "expert_dtype", "fp8", "fp4", default="fp8") == "fp8":
        return everywhere(weights)
    return everywhere(weights, replace(fp4_grid("FP4 experts", 32, scales, needed, "weight"), dtypes=INT8 | BYTES))


def fbgemm(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of FBGEMM's FP8 by channel."""
    return everywhere(ScaledGrid(name="FP8 by channel", block=CHANNEL, needed={"scale": ("{key}_scale",)}))


def mxfp4(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of gpt-oss."""
    return everywhere(Mxfp4Experts())


def gptq(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of GPTQ, as AutoGPTQ and GPTQModel state it."""
    bits = allowed(stated, "bits", 2, 3, 4, 8)
    version = allowed(stated, "checkpoint_format", "gptq", "gptq_v2", default=stated.get("format") or "gptq")
    allowed(stated, "pack_dtype", "int32", default="int32")
    refuse_stated(stated, "rotation", "adapter")
    dynamic = stated.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not pattern.startswith("-:") for pattern in dynamic):  # are not quantised
        raise UnknownSchemeError("expected one number of bits for all modules, got others in 'dynamic'")
    group = size(stated, "group_size", whole=-1)
    return everywhere(
        Gptq(name=f"GPTQ, {bits} bits", bits=bits, group_size=group, version=2 if version == "gptq_v2" else 1)
    )


def awq(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of AWQ, as AutoAWQ states it."""
    bits = allowed({"bits": stated.get("bits", stated.get("w_bit"))}, "bits", 4)
    version = str(stated.get("version") or stated.get("format") or "gemm").lower()
    allowed({"version": version}, "version", "gemm")
    allowed(stated, "zero_point", True, default=True)
    return everywhere(Awq(name="AWQ", bits=bits, group_size=size(stated, "group_size", "q_group_size", whole=-1)))


def modelopt(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of ModelOpt: one format, or with MIXED_PRECISION one for each of the modules it lists."""
    inner = stated.get("quantization")
    about = inner if isinstance(inner, dict) else stated
    if about.get("quant_algo") != "MIXED_PRECISION":
        return everywhere(*modelopt_formats(about))
    layers = about.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise UnknownSchemeError("expected quantized_layers to be an object of objects")
    modules: dict[str, set[str]] = defaultdict(set)
    formats = {}
    for name, layer in layers.items():
        modules[repr(layer)].add(name)
        formats[repr(layer)] = modelopt_formats(layer)
    return tuple(FormatRule(names.__contains__, formats[layer]) for layer, names in modules.items())


def modelopt_formats(stated: Stated) -> tuple[WeightFormat, ...]:
    """Return the formats of a `quant_algo`."""
    algorithm = allowed(stated, "quant_algo", None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8")
    scale = {"scale": ("{key}_scale",)}
    if algorithm is None:
        return ()
    if algorithm == "NVFP4":
        allowed(stated, "group_size", 16, default=16)
        return (nvfp4({**scale, "overall": ("{key}_scale_2",)}, ending="weight", exponent=1),)
    if algorithm == "MXFP8":
        return (mxfp8_grid(scale),)
    return (ScaledGrid(name=f"ModelOpt {algorithm}", block=TENSOR if algorithm == "FP8" else CHANNEL, needed=scale),)


def nvfp4(needed: Templates, ending: str, exponent: int) -> ScaledGrid:
    """Return NVFP4: FP4 numbers, an FP8 scale for 16 of a row, and one for all (see `ScaledGrid`)."""
    return fp4_grid("NVFP4", 16, FP8, needed, ending, exponent)


def fp4_grid(
    name: str, columns: int, scale_dtypes: frozenset[str], needed: Templates, ending: str, exponent: int = 1
) -> ScaledGrid:
    """Return FP4 numbers, two a byte, with a scale for so many `columns` of a row; the others as in `ScaledGrid`."""
    return ScaledGrid(
        name=name,
        block=ScaleBlock(1, columns),
        dtypes=BYTES,
        decoded=fp4,
        per_code=2,
        scale_dtypes=scale_dtypes,
        exponent=exponent,
        ending=ending,
        plain_ending="weight" if ending == "weight" else "",
        needed=needed,
    )


def mxfp8_grid(needed: Templates) -> ScaledGrid:
    """Return MXFP8: FP8 numbers with a power of two for 32 of a row."""
    return ScaledGrid(
        name="MXFP8",
        block=ScaleBlock(1, 32),
        scale_dtypes=BYTES | {"F8_E8M0"},
        needed=needed,
        ending="weight",
        plain_ending="weight",
    )


def bitsandbytes(stated: Stated) -> tuple[FormatRule, ...]:
    """Return the rules of bitsandbytes."""
    if stated.get("load_in_8bit"):
        return everywhere(Int8Rows())
    allowed(stated, "load_in_4bit", True)
    return everywhere(FourBits.of(allowed(stated, "bnb_4bit_quant_type", "nf4", "fp4", default="fp4")))
