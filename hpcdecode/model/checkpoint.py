"""Weights of a model directory: safetensors files, mapped and used where they lie."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.config import first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def open_checkpoint(path: Path) -> dict[str, Callable[[], Tensor]]:
    """For each tensor of the checkpoint in `path` a function that returns it, backed by the mapped file.

    Raises UserError for a missing, truncated or unreadable file, naming it.
    """
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in shard_files(path):
        shard = open_shard(file)
        tensors.update({key: lambda shard=shard, key=key: shard.get_tensor(key) for key in shard.keys()})  # noqa: SIM118
    return tensors


def shard_files(path: Path) -> list[Path]:
    """The safetensors files of `path`, all present."""
    if (path / INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path / INDEX} is not a safetensors index ({first_line(e)}): copy it again") from e
    elif (path / SINGLE).is_file():
        names = [SINGLE]
    elif any(path.glob("*.bin")):
        raise UserError(
            f"{path} has PyTorch .bin weights only; expected safetensors: convert them with "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`"
        )
    else:
        raise UserError(f"{path} holds no weights: expected {SINGLE}, or {INDEX} and the files it names")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        some = ", ".join(missing[:5])
        raise UserError(f"{path} lacks {len(missing)} of {len(names)} weight files: {some}; copy them beside {INDEX}")
    return [path / name for name in names]


def open_shard(file: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        size = file.stat().st_size
        raise UserError(
            f"{file} ({size} bytes) is truncated or not safetensors ({first_line(e)}): copy or download it again"
        ) from e


def forget_pages(path: Path) -> None:
    """Take the mapped weights of `path` out of this process's memory; what is used again is read again."""
    files = {str(file.resolve()) for file in shard_files(path)}
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        for span, *_, file in (line.split(maxsplit=5) for line in maps if "/" in line):
            if file.rstrip() in files:
                start, end = (int(address, 16) for address in span.split("-"))
                advise(start, end - start, mmap.MADV_DONTNEED)


class Stack(tuple):
    """An experts' weight left as its checkpoint tensors: for each expert the [out_j, in] pieces that make it up."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self), sum(piece.shape[0] for piece in self[0]), self[0][0].shape[1]


def read_weights(
    path: Path, model: torch.nn.Module, wanted: set[str], stackable: set[str], device: torch.device
) -> dict[str, Tensor | Stack]:
    """The parameters and persistent buffers `wanted` of `model` (a skeleton without storage), by name.

    Keys and layouts of the checkpoint become the model's by transformers' own conversion mapping. A tensor that has
    the skeleton's dtype already is bound in place (mapped, on the CPU); others are converted one at a time. Experts'
    weights in `stackable` stay separate tensors. Raises UserError for missing tensors and wrong shapes.
    """
    target = {**model.state_dict(keep_vars=True), **{k: v for k, v in model.named_parameters(remove_duplicate=False)}}
    sources = match_keys(open_checkpoint(path), model, target)
    weights: dict[str, Tensor | Stack] = {}
    for name in wanted:
        held = held_name(name, sources, model)
        if held is None:
            continue
        if held not in weights:
            found = sources[held](held in stackable)
            weights.update({k: place(v, target[k], device) for k, v in found.items() if k in target})
        if held in weights:
            weights[name] = weights[held]
    check_weights(path, weights, {name: target[name] for name in wanted})
    return {name: weights[name] for name in wanted}


def match_keys(tensors: dict[str, Callable], model, target: dict) -> dict[str, Callable[[bool], dict]]:
    """For each model tensor the checkpoint holds, a function of "may it stay a Stack?" that yields it by name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, Callable[[bool], dict]] = {}
    collected: dict[str, tuple] = {}
    prefix = model.base_model_prefix
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, target)
        if name not in target and key in target:
            name, pattern = key, None
        if name not in target:
            continue
        if pattern is None:
            sources[name] = lambda _, name=name, read=tensors[key]: {name: read()}
        else:
            _, parts = collected.setdefault(name, (by_pattern[pattern], {}))
            parts.setdefault(pattern, []).append((key, tensors[key]))
    for name, (converter, parts) in collected.items():
        read = lambda stay, name=name, c=converter, parts=parts: convert(name, c, parts, model, stay)  # noqa: E731
        for target_name in converted_names(name, converter):
            sources[target_name] = read
    return sources


def converted_names(name: str, converter) -> list[str]:
    """All model tensors that a conversion yields whose first is `name`."""
    first, *others = converter.target_patterns
    return [name, *(name.replace(first, other) for other in others)]


def convert(name: str, converter, parts: dict[str, list], model, stay: bool) -> dict[str, Tensor | Stack]:
    """Run one of transformers' conversions, or leave an experts' merge undone where `stay` allows."""
    from copy import deepcopy

    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    if stay and steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        columns = [[read() for _, read in parts[p]] for p in converter.source_patterns if p in parts]
        return {name: Stack(zip(*columns, strict=True))}
    own = deepcopy(converter)
    for pattern, entries in parts.items():
        for key, read in entries:
            own.add_tensor(name, key, pattern, read)
    result = own.convert(name, model=model, config=model.config)
    return {k: v[0] if isinstance(v, list) else v for k, v in result.items()}


def held_name(name: str, sources: dict, model) -> str | None:
    """`name`, or the tensor it is tied to, whichever the checkpoint holds."""
    if name in sources:
        return name
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    root = tied.get(name, name)
    family = [root, *(k for k, v in tied.items() if v == root)]
    return next((n for n in family if n in sources), None) if root != name or name in tied.values() else None


def place(value: Tensor | Stack, like: Tensor, device: torch.device) -> Tensor | Stack:
    if isinstance(value, Stack):
        return Stack(tuple(place(piece, like, device) for piece in pieces) for pieces in value)
    return value.to(device=device, dtype=like.dtype)


def check_weights(path: Path, weights: dict, target: dict[str, Tensor]) -> None:
    missing = sorted(set(target) - set(weights))
    if missing:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(target)} tensors of the model, among them {missing[0]!r}: "
            "the checkpoint is incomplete or belongs to another config.json"
        )
    for name, like in target.items():
        came, expected = list(weights[name].shape), list(like.shape)
        if came != expected:
            raise UserError(
                f"{path}: tensor {name!r} has shape {came}, config.json asks for {expected}: one of the two is wrong"
            )
