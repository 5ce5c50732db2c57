"""Job files: TOML files with values for the flags of `hpcdecode generate`, named with underscores."""

from __future__ import annotations

import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from msgspec.structs import replace

from hpcdecode.attention.recurrent_shapes import STATE_DTYPES
from hpcdecode.cli.arguments import parse_dtype
from hpcdecode.cli.generate_flags import text_or_file
from hpcdecode.cli.parser import near
from hpcdecode.cli.sampling_flags import parse_generation_config
from hpcdecode.config import KV_DTYPES, STDIN, Job
from hpcdecode.data.prompts.kept import parse_names
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.requests.field_types import typed
from hpcdecode.requests.params import sampling_kinds
from hpcdecode.requests.shard import Shard
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.system.model_path import model_from, read_toml
from hpcdecode.system.sizes import parse_bytes

_FAIL_FAST = "fail_fast"
_NO_KEYS = ("params", "score", "adapters")  # of a job: the subcommand says the second, a table `lora` the third
_PARSED: dict[str, Callable[[Any], object]] = {  # if given as strings
    "dtype": parse_dtype,
    "generation_config": parse_generation_config,
    "gpu_memory": parse_bytes,
    "keep_columns": parse_names,
    "kv_dtype": partial(parse_dtype, among=KV_DTYPES),
    "kv_memory": parse_bytes,
    "mamba_ssm_cache_dtype": partial(parse_dtype, among=STATE_DTYPES),
    "kv_swap": lambda tier: (tier,),
    "shard": Shard.parse,
    "speculative_config": SpeculativeConfig.of,
}
_TABLES = {"speculative_config"}  # among these, those that may be tables, too


def read_job_file(path: str) -> dict[str, Any]:
    """Return the values of a job file, by the names of the fields of Job and SamplingParams.

    Relative paths in it (`prompts`, `model`, `lora`, `output`, `trace`, `profile`) start at the file's folder; names of
    models are no paths. `lora` may be a table of directories by name.

    Raises:
        UserError: If the file is no TOML, a key is the name of no flag, or a value has the wrong type.
    """
    kinds, values = _kinds(), read_toml(path)
    unknown = sorted(values.keys() - kinds.keys())
    if unknown:
        known = ", ".join(sorted(kinds))
        meant = near(unknown[0], kinds)
        raise UserError(
            f"job file {path}: expected keys among {known}; got {', '.join(unknown)}{meant}", everywhere=True
        )
    try:
        named = {"adapters": typed("lora", dict[str, str], values.pop("lora"))} if _is_table(values, "lora") else {}
        values = {name: _value(name, kinds[name], value) for name, value in values.items()} | named
    except RowProblem as problem:
        raise UserError(f"job file {path}: {problem}", everywhere=True) from None
    if values.pop(_FAIL_FAST, False):
        values["max_errors"] = 0
    return _from_folder(Path(path).parent, values)


def _kinds() -> dict[str, Any]:
    """Return the type of every key's values, that of its field without None."""
    job = {name: _filled(kind) for name, kind in typing.get_type_hints(Job).items() if name not in _NO_KEYS}
    return {**job, **sampling_kinds(), _FAIL_FAST: bool, "shard": str, "generation_config": str}


def _is_table(values: dict[str, Any], name: str) -> bool:
    return isinstance(values.get(name), dict)


def _filled(kind: Any) -> Any:
    parts = [part for part in typing.get_args(kind) if part is not NoneType]
    return parts[0] if NoneType in typing.get_args(kind) else kind


def _value(name: str, kind: Any, value: Any) -> Any:
    if name in _PARSED and isinstance(value, (str, dict) if name in _TABLES else str):
        try:
            return _PARSED[name](value)
        except ValueError as error:
            raise RowProblem(f"{name}: {error}") from None
    return typed(name, kind, value)


def _from_folder(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    if "prompts" in values:
        values["prompts"] = tuple(p if p == STDIN else str(folder / p) for p in values["prompts"])
    if "model" in values:
        values["model"] = model_from(folder, values["model"])
    guesses: SpeculativeConfig | None = values.get("speculative_config")
    if guesses is not None and guesses.model is not None:
        values["speculative_config"] = replace(guesses, model=model_from(folder, guesses.model))
    for name in values.keys() & {"prompt_template", "messages_template", "system_prompt"}:
        if (folder / values[name]).is_file():
            values[name] = text_or_file(str(folder / values[name]))
    for name in values.keys() & {"lora", "output", "trace", "profile"}:
        values[name] = str(folder / values[name])
    if "adapters" in values:
        values["adapters"] = {name: str(folder / adapter) for name, adapter in values["adapters"].items()}
    return values
