"""Reading a model directory's config.json, and refusing by name what the split cannot run."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.stated import QUANTISATION_FILES, check_quantisation, check_values, quantised, scheme_of

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
ROPE_REFUSED = {
    "dynamic": "its rotary frequencies change with the longest sequence seen, so that rows would depend on each other",
    "longrope": "it switches all rows between short and long factors by the longest row of the batch",
}
MOST_JSON_BYTES = 64 << 20
OTHER_TOWERS = ("vision_config", "audio_config", "speech_config")


class ModelFacts(msgspec.Struct, frozen=True):
    """What is asked of a config once its model is traced."""

    model_type: str
    architectures: list[str] | None
    max_positions: int | None

    @classmethod
    def of(cls, config) -> ModelFacts:
        return cls(config.model_type, config.architectures, getattr(config, "max_position_embeddings", None))


def config_file(path: str | Path) -> Path:
    """config.json of the model directory `path`; UserError where one of the two is missing or cannot be read."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model directory {path} does not exist: give one in Hugging Face format")
    file = path / "config.json"
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file} is missing: expected a model directory in Hugging Face format")
    return file


def stated_config(path: str | Path) -> dict[str, Any]:
    """Return what config.json of the model directory `path` states of the language model; {} if there is none.

    Raises UserError if its values are absurd, if a file there states a quantisation, or if one is no regular file.
    """
    folder = Path(path)
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise UserError(f"{entry}: expected regular files in a model directory, got a pipe or a device: remove it")
    file = folder / "config.json"
    config = read_json(file)
    check_values(file, config)
    check_values(file, text_config(config))
    check_quantisation(file, config)
    for other in (folder / name for name in QUANTISATION_FILES):
        if other.exists():
            raise quantised(other, f"it states their quantisation{scheme_of(read_json(other))}")
    return text_config(config)


def stated_dtype(path: str | Path) -> str | None:
    """The dtype of the checkpoint in `path` as its config.json has it, such as bfloat16."""
    config = text_config(read_json(config_file(path)))
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model; what it lacks comes from the top level."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def read_json(path: Path) -> dict[str, Any]:
    """Return {} if there is no such file. Raises UserError if it holds no JSON object, or is too large for one."""
    try:
        size = path.stat().st_size
        if size > MOST_JSON_BYTES or (path.exists() and not path.is_file()):
            raise UserError(f"{path}: expected a JSON object in a regular file of at most 64 MiB, got {size:,} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: expected a JSON object, got: {first_line(e)}") from e
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(path: str | Path):
    """Return the transformers config of the model directory `path`.

    Raises UserError where the directory, its config.json or support for its architecture is missing.
    """
    from transformers import AutoConfig

    file = config_file(path)
    stated_config(path)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False, local_files_only=True)
    except Exception as e:
        raise UserError(f"{file} cannot be used: {first_line(e)}") from e
    check_supported(config)
    return config


def check_supported(config) -> None:
    """Raise UserError, naming model and reason, for a model known by its config to be beyond the split."""
    from transformers import AutoModelForCausalLM

    def refuse(reason: str):
        raise unsupported(config, reason)

    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder; expected a decoder-only language model")
    for tower in OTHER_TOWERS:
        if getattr(config, tower, None) is not None:
            refuse(
                f"it has a {tower.removesuffix('_config')} tower; expected a text-only checkpoint of the language model"
            )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        refuse("transformers has no causal language model for it")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ATTENTION_KINDS:
            refuse(f"layer {layer} is {kind!r}; attend does {' and '.join(sorted(ATTENTION_KINDS))}")
    for kind in rope_types(config):
        if kind in ROPE_REFUSED:
            refuse(f"rope type {kind!r}: {ROPE_REFUSED[kind]}")


def unsupported(config, reason: str) -> UserError:
    return UserError(f"model type {config.model_type!r} is not supported: {reason}")


def rope_types(config) -> set[str]:
    """The rotary embedding types named by `config`, over all kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    return {v.get("rope_type", "default") for v in nested}


@contextlib.contextmanager
def quiet():
    """Silence transformers and the tracer inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
