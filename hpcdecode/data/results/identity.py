"""What makes a job the same job: an interrupted one is continued only with the same model, prompts and sampling."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.config import STDIN, Job

_ENDS = 1 << 20  # bytes at either end of a file that tell it from another of its size
_MODEL_FILES = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*", "vocab*", "chat_template*")


def identity(job: Job, files: Sequence[str], dtype: str, kv_dtype: str) -> dict[str, Any]:
    """All that the tokens of a job depend on, as it is stored with the results.

    Files are told apart by size, first and last MiB, not by name or time: they may move. How the work is split (ranks,
    lanes, batch) does not matter.
    """
    about = {
        "model": {path.name: _fingerprint(path) for path in _model_files(job.model)},
        "prompts": [STDIN if path == STDIN else _fingerprint(path) for path in files],
        "prompt_column": job.prompt_column,
        "shard": str(job.shard) if job.shard else None,
        "sampling": msgspec.to_builtins(job.params),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "weights": job.weights,
    }
    return msgspec.json.decode(msgspec.json.encode(about))  # as it will be read again


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """One phrase for every value that is not the same, such as `sampling.seed was 0 and is 1`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        kind = name.split(".")[0]
        yield f"{name} changed" if kind in ("model", "prompts") else f"{name} was {before!r} and is {now!r}"


def _model_files(directory: str) -> list[Path]:
    return sorted({path for pattern in _MODEL_FILES for path in Path(directory).glob(pattern) if path.is_file()})


def _fingerprint(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in (0, max(_ENDS, size - _ENDS)):
            file.seek(start)
            digest.update(file.read(_ENDS))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"
