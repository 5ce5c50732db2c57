"""The identity of a job: everything that its tokens depend on.

An interrupted job is resumed only with the identity that its results have: the same model, prompts and sampling.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.config import LITERAL, STDIN, Job
from hpcdecode.data.prompts.kept import NONE
from hpcdecode.data.prompts.opening import is_once
from hpcdecode.model.frontend.adapter_files import adapter_files
from hpcdecode.model.frontend.gguf.folder import gguf_files, model_folder
from hpcdecode.requests.output_parser import NONE as NO_PARSER
from hpcdecode.requests.params import SamplingParams

_END_BYTES = 1 << 20  # at the begin and at the end of a file, which are compared
_KEPT = "keep_columns"
_LATER = ("thinking_token_budget",)  # parameters that earlier versions lack, None if they are not used
_NAME_CHARACTERS = 16
_MODEL_FILES = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*", "vocab*", "chat_template*")


def identity(
    job: Job, files: Sequence[str], dtype: str, kv_dtype: str, keep_columns: Sequence[str] = NONE
) -> dict[str, Any]:
    """Return the identity of a job, in the form that is stored with its results.

    Files are compared by their size, first and last MiB. Their names and times do not matter, nor do ranks, lanes and
    batch size.

    Args:
        job: The job.
        files: Paths of its prompt files.
        dtype: Data type of the weights and activations.
        kv_dtype: Data type of the KV cache.
        keep_columns: Input columns in the results: ALL, NONE, or names.
    """
    about = {
        "model": {path.name: _fingerprint(path) for path in _model_files(job.model)},
        "prompts": [_of_prompts(path) for path in files],
        "prompt_column": job.prompt_column,
        "shard": str(job.shard) if job.shard else None,
        "sampling": _sampling(job.params),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "weights": job.weights,
    }
    if tuple(keep_columns) != NONE:  # left out else, as in results of earlier versions, as are the next ones
        about[_KEPT] = sorted(keep_columns)
    for name in ("prompt_template", "messages_template", "system_prompt", "chat", "score", "skip_tokenizer_init"):
        if getattr(job, name):
            about[name] = getattr(job, name)
    for name in ("reasoning_parser", "tool_call_parser"):
        if getattr(job, name) != NO_PARSER:
            about[name] = getattr(job, name)
    if job.mamba_ssm_cache_dtype not in (None, "float32"):
        about["mamba_ssm_cache_dtype"] = job.mamba_ssm_cache_dtype
    if job.activations not in (None, "auto"):
        about["activations"] = job.activations
    if job.lora is not None:
        about["lora"] = _of_adapter(job.lora)
    if job.adapters:
        about["adapters"] = {name: _of_adapter(folder) for name, folder in job.adapters.items()}
    stored: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(about))  # as it will be read again
    return stored


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters by name, without those that earlier versions lack and the job does not use."""
    values: dict[str, Any] = msgspec.to_builtins(params)
    return {name: value for name, value in values.items() if name not in _LATER or value is not None}


def _of_adapter(folder: str) -> dict[str, str]:
    return {path.name: _fingerprint(path) for path in adapter_files(folder)}


def _of_prompts(path: str) -> str:
    """Return what stands for a prompt file: a literal prompt itself, `-` for any pipe."""
    if path.startswith(LITERAL):
        return path
    return STDIN if is_once(path) else _fingerprint(path)


def kept_before(identity: object) -> tuple[str, ...]:
    """Return the `keep_columns` that an identity was made with."""
    names = identity.get(_KEPT) if isinstance(identity, dict) else None
    return tuple(map(str, names)) if isinstance(names, list) else NONE


def job_name(identity: object) -> str:
    """Return a name for the job with this identity: 16 hexadecimal digits."""
    text = msgspec.json.encode(identity, enc_hook=str, order="sorted")
    return hashlib.sha256(text).hexdigest()[:_NAME_CHARACTERS]


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield a phrase for each value that differs between two identities, such as `sampling.seed was 0 and is 1`.

    Args:
        before: The identity stored with the results, or a part of it.
        now: The identity of the job, or the same part of it.
        name: Name of the part.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        kind = name.split(".")[0]
        if kind == _KEPT:
            before, now = (",".join(value or NONE) for value in (before, now))
        yield (
            f"{name} changed"
            if kind in ("model", "lora", "adapters", "prompts")
            else f"{name} was {before!r} and is {now!r}"
        )


def _model_files(directory: str) -> list[Path]:
    folder = model_folder(directory)
    if files := gguf_files(folder):
        return files
    return sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file()})


def _fingerprint(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in (0, max(_END_BYTES, size - _END_BYTES)):
            file.seek(start)
            digest.update(file.read(_END_BYTES))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"
