"""Find what a model directory states of its quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.config import QUANTISATION_KEYS, read_json
from hpcdecode.model.frontend.quantization.auto_round import auto_round
from hpcdecode.model.frontend.quantization.compressed import compressed_tensors
from hpcdecode.model.frontend.quantization.quark import quark
from hpcdecode.model.frontend.quantization.scheme import (
    FormatRule,
    Scheme,
    Stated,
    UnknownSchemeError,
    awq,
    bitsandbytes,
    fbgemm,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)

METHODS: dict[str, Callable[[Stated], tuple[FormatRule, ...]]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "bitsandbytes": bitsandbytes,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "quark": quark,
}
KEYS = {**dict.fromkeys((*QUANTISATION_KEYS, "quantization"), ""), "compression_config": "compressed-tensors"}
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
NAMING = ("quant_algo", "format", "bits", "w_bit")  # what names the scheme in these objects


def read_scheme(folder: Path) -> Scheme | None:
    """Return how the weights in a model directory are quantised; None if nothing there states that they are.

    Raises:
        UserError: If a file states a scheme that is not understood, or if two files state different ones.
    """
    found = list(statements(folder))
    methods = {method for _, method, _ in found}
    for file, method, stated in found:
        if method not in METHODS or not isinstance(stated, dict):
            raise refused(file, f"weights quantised by {method or 'an unnamed method'}{scheme_of(stated)}")
    if len(methods) > 1:
        raise refused(folder, f"weights that are quantised by {' and by '.join(sorted(methods))}")
    for file, method, stated in found:
        try:
            return Scheme(file, f"{method}{scheme_of(stated)}", METHODS[method](stated))
        except UnknownSchemeError as e:
            raise refused(file, f"weights quantised by {method}{scheme_of(stated)}, where {e}") from e
    return None


def statements(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield what states a quantisation: the file, the method ("" if none is named), and the statement."""
    file = folder / "config.json"
    for config in objects(read_json(file)):
        for key, method in KEYS.items():
            if (stated := config.get(key)) is not None:
                if isinstance(stated, dict) and "expert_dtype" in config:  # as in DeepSeek-V4's; later within it
                    stated = {"expert_dtype": config["expert_dtype"], **stated}
                yield file, method_of(stated) or method, stated
    for name, method in FILES.items():
        if (folder / name).exists():
            stated = read_json(folder / name)
            yield folder / name, method_of(stated) or method, stated


def objects(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield `config` and the objects in it, but not those within a statement of a quantisation."""
    waiting = [config]
    while waiting:
        yield (own := waiting.pop())
        waiting += [value for key, value in own.items() if isinstance(value, dict) and key not in KEYS]


def method_of(stated: object) -> str:
    """Return the method that a statement names, or ""."""
    if not isinstance(stated, dict):
        return ""
    named = stated.get("quant_method")
    if isinstance(named, str):
        return named.lower()
    return "bitsandbytes" if stated.get("load_in_8bit") or stated.get("load_in_4bit") else ""


def scheme_of(stated: object) -> str:
    """Return the scheme that a statement names, such as " (quant_algo FP8)"; empty if it names none."""
    found: dict[str, Any] = {}
    for each in objects(stated) if isinstance(stated, dict) else ():
        found = {**each, **found}
    inner = found.get("quantization")
    found = {**found, **(inner if isinstance(inner, dict) else {})}
    named = [f"{key} {found[key]}" for key in NAMING if isinstance(found.get(key), str | int)]
    return f" ({', '.join(named):.100})" if named else ""


def refused(file: Path, found: str) -> UserError:
    """Return the error for quantised weights that cannot be read; found: what `file` shows of them."""
    return UserError(
        f"{file}: expected weights in bfloat16, float16, float32 or a quantised format that docs/usage.md lists, got "
        f"{found}; dequantise the checkpoint to bfloat16, or give another checkpoint of the model"
    )
