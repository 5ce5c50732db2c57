"""Weights of a model directory: safetensors files, mapped and used where they lie."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.meta import Meta
from hpcdecode.model.sources import Sources

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
    path: Path,
    tensors: dict[str, Callable[[], Tensor]],
    sources: Sources,
    wanted: dict[str, Meta],
    device: torch.device,
) -> dict[str, Tensor | Stack]:
    """The weights `wanted` by name, in these shapes and dtypes, from the `tensors` of the checkpoint in `path`.

    A tensor that has its dtype already is used in place (mapped, on the CPU); others are converted one at a time.
    Raises UserError for missing tensors and wrong shapes.
    """
    like = {sources.ties.get(name, name): wanted[name].dtype for name in wanted}
    weights: dict[str, Tensor | Stack] = {}
    for name, key in sources.keys.items():
        weights[name] = place(tensors[key](), like[name], device)
    for name, experts in sources.stacks.items():
        weights[name] = place(Stack(tuple(tensors[key]() for key in keys) for keys in experts), like[name], device)
    for conversion in sources.conversions:
        made = conversion.run(tensors)
        weights.update({name: place(value, like[name], device) for name, value in made.items() if name in like})
    weights.update({name: weights[held] for name, held in sources.ties.items() if held in weights})
    check_weights(path, weights, wanted)
    return {name: weights[name] for name in wanted}


def place(value: Tensor | Stack, dtype: torch.dtype, device: torch.device) -> Tensor | Stack:
    if isinstance(value, Stack):
        return Stack(tuple(place(piece, dtype, device) for piece in pieces) for pieces in value)
    return value.to(device=device, dtype=dtype)


def check_weights(path: Path, weights: dict, wanted: dict[str, Meta]) -> None:
    missing = sorted(set(wanted) - set(weights))
    if missing:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(wanted)} tensors of the model, among them {missing[0]!r}: "
            "the checkpoint is incomplete or belongs to another config.json"
        )
    for name, like in wanted.items():
        came, expected = list(weights[name].shape), list(like.shape)
        if came != expected:
            raise UserError(
                f"{path}: tensor {name!r} has shape {came}, config.json asks for {expected}: one of the two is wrong"
            )
