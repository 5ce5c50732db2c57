"""The checkpoint of a model directory: safetensors files, mapped into memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.gguf.folder import gguf_files
from hpcdecode.model.frontend.mapped import MappedFile
from hpcdecode.model.frontend.tensors import CheckpointFile, StoredTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_INDEX_BYTES = 512 << 20
NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")  # in a key, such as a layer's place


class Index(msgspec.Struct):
    """What is read of the index of a checkpoint in several files: by key the name of the file that holds it."""

    weight_map: dict[str, str]


def holds_weights(path: Path) -> bool:
    """Return whether the model directory `path` has safetensors files under their usual names, or is of GGUF files."""
    return (path / INDEX).exists() or (path / SINGLE).exists() or bool(gguf_files(path))


def open_checkpoint(path: Path, layers: int | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by key. Only the headers of its files are read.

    Args:
        path: Model directory.
        layers: Number of layers that config.json states, or None.

    Raises:
        UserError: If a file is missing, truncated or unreadable, or if the checkpoint has fewer layers.
    """
    tensors: dict[str, StoredTensor] = {}
    places = weight_map(path)
    for file in shard_files(path, places):
        tensors.update({key: own for key, own in stored_tensors(file).items() if places.get(key, file) == file})
    most = max((int(number) for key in tensors for number in NUMBER.findall(key)), default=None)
    if layers is not None and most is not None and most + 1 < layers:
        raise UserError(
            f"{path}: config.json states {layers} layers, the weights have {most + 1}: one of them is wrong"
        )
    return tensors


def weight_map(path: Path) -> dict[str, Path]:
    """Return by key the file that the index of the checkpoint in `path` names for it; {} if there is no index.

    A file may be a link to anywhere.

    Raises:
        UserError: If the index is not one, or if it names files outside of `path`.
    """
    index = path / INDEX
    if not index.exists():
        return {}
    try:
        if not 0 < index.stat().st_size <= MOST_INDEX_BYTES or not index.is_file():
            raise ValueError(f"expected a file of at most {MOST_INDEX_BYTES:,} bytes")
        places = msgspec.json.decode(index.read_bytes(), type=Index).weight_map
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{index} is not a safetensors index ({first_line(e)}): copy it again") from e
    names = set(places.values())
    for name in names:
        if not name or "\0" in name or os.path.isabs(name) or ".." in name.split(os.sep):
            raise UserError(f"{index}: expected names of files in its own directory, got {name!r:.200}: copy it again")
    files = {name: path / name for name in names}
    return {key: files[name] for key, name in places.items()}


def shard_files(path: Path, places: Mapping[str, Path]) -> list[Path]:
    """Return the safetensors files of a checkpoint, all of which exist.

    Args:
        path: Model directory.
        places: Result of `weight_map`.

    Raises:
        UserError: If files are missing, or if there are none.
    """
    if (path / INDEX).exists():
        files = sorted(set(places.values()))
    elif (path / SINGLE).is_file():
        files = [path / SINGLE]
    elif any(path.glob("*.bin")):
        raise UserError(
            f"{path} has PyTorch .bin weights only; expected safetensors: convert them with "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`"
        )
    else:
        raise UserError(f"{path} holds no weights: expected {SINGLE}, or {INDEX} and the files it names")
    missing = [file for file in files if not os.path.isfile(file)]  # not Path.is_file: a name may be too long
    if missing:
        some = ", ".join(str(file.relative_to(path)) for file in missing[:5])
        raise UserError(
            f"{path} lacks {len(missing)} of {len(files)} weight files: {some:.500}; copy them beside {INDEX}"
        )
    return files


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by key. Raise UserError as `open_shard` does."""
    shard = open_shard(file)
    mapped = MappedFile(file, shard, partial(some_address, shard))
    return {key: StoredTensor(mapped, shard, key) for key in shard.keys()}  # noqa: SIM118


def open_shard(file: Path) -> CheckpointFile:
    """Open a safetensors file and read its header. Raise UserError if it is truncated or another kind of file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        size = file.stat().st_size
        raise UserError(
            f"{file} ({size} bytes) is truncated or not safetensors ({first_line(e)}): copy or download it again"
        ) from e


def some_address(shard: CheckpointFile) -> int | None:
    """Return the address of a byte of a mapped safetensors file, or None if its tensors are empty."""
    some = (shard.get_tensor(key) for key in shard.keys())  # noqa: SIM118
    return next((tensor.data_ptr() for tensor in some if tensor.nbytes), None)
