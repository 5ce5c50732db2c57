"""Read a model directory's config.json, and refuse models that cannot be run in slices, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.architectures import model_class, text_of, type_by_architectures
from hpcdecode.model.frontend.compressors import COMPRESSED
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.model.frontend.indexers import INDEXED, all_chosen, leaves_out_newest
from hpcdecode.model.frontend.inkling import SLIDING
from hpcdecode.model.frontend.llama4 import CHUNKED
from hpcdecode.model.frontend.ngrams import ngrams_problem
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.model.frontend.stated import check_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ATTENTION_KINDS = INDEXED | COMPRESSED | {CHUNKED, "full_attention", "sliding_attention"}
ATTENTION_KINDS |= {"hybrid", SLIDING}  # beside recurrences
OTHER_KINDS = frozenset({"linear_attention", "conv", "moe", "mlp"})  # of layers without attention
MOST_JSON_BYTES = 64 << 20
QUANTISATION_KEYS = ("quantization_config", "compression_config")


class ModelFacts(msgspec.Struct, frozen=True):
    """What is asked of a model's config after the model is traced.

    Attributes:
        model_type: Type of the model, such as llama.
        architectures: Classes of transformers that can load it, such as LlamaForCausalLM.
        max_positions: Length in tokens of the longest sequence that can be run, or None.
        own_positions: The same of the model itself, which is longer where it begins to leave out tokens: by sparse
            attention, or by attention in chunks.
    """

    model_type: str
    architectures: list[str] | None
    max_positions: int | None
    own_positions: int | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelFacts:
        """Return the facts in `config`."""
        own = _stated_positions(text_of(config))
        return cls(config.model_type, config.architectures, longest(text_of(config)), own)


def _stated_positions(config: PreTrainedConfig) -> int | None:
    names = "max_position_embeddings", "max_seq_len"
    return next((stated for name in names if (stated := getattr(config, name, None)) is not None), None)


def longest(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a sequence that the language model `config` can be run on, or None."""
    limits = _stated_positions(config), all_chosen(config)
    return min((limit for limit in limits if limit is not None), default=None)


def config_file(path: str | Path) -> Path:
    """Return config.json of the model directory `path`. Raise UserError if it is missing or cannot be read."""
    folder = model_folder(path)
    if not folder.is_dir():
        raise UserError(f"model directory {folder} does not exist: give one in Hugging Face format")
    file = folder / "config.json"
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file} is missing: expected a model directory in Hugging Face format")
    return file


def stated_config(path: str | Path) -> dict[str, Any]:
    """Return what config.json of the model directory `path` states of the language model; {} if there is none.

    Raises:
        UserError: If a value is absurd, or if a file there is not a regular file.
    """
    folder = model_folder(path)
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise UserError(f"{entry}: expected regular files in a model directory, got a pipe or a device: remove it")
    file = folder / "config.json"
    config = read_json(file)
    check_values(file, config)
    check_values(file, text_config(config))
    return text_config(config)


def stated_dtype(path: str | Path) -> str | None:
    """Return the dtype of the checkpoint in `path` that its config.json states, such as bfloat16, or None."""
    config = text_config(read_json(config_file(path)))
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model, on top of what its top level states."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def unquantised(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` without what it, or its part for the language model, states of quantised weights."""
    own = {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}
    text = own.get("text_config")
    return {**own, "text_config": unquantised(text)} if isinstance(text, dict) else own


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, or {} if there is no such file.

    Raises:
        UserError: If the file holds anything else, or if it is larger than MOST_JSON_BYTES.
    """
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


def read_config(path: str | Path) -> PreTrainedConfig:
    """Return the transformers config of the model directory `path`, as if its weights were not quantised.

    Raises:
        UserError: If the directory or its config.json is missing, or if its architecture is not supported.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    file = config_file(path)
    stated_config(path)
    try:
        with quiet():
            meant = type_by_architectures(read_json(file))
            read: Callable[..., PreTrainedConfig]
            config: PreTrainedConfig
            if meant is None:
                read = AutoConfig.from_pretrained
                config = read(file.parent, trust_remote_code=False, local_files_only=True)
            else:
                read = CONFIG_MAPPING[meant].from_pretrained
                config = read(file.parent, local_files_only=True, model_type=meant)
            text = text_of(config)
    except Exception as e:
        wrapped = first_line(e).endswith(":") and e.__cause__ is not None  # by checks of a config's class
        raise UserError(f"{file} cannot be used: {first_line((e.__cause__ if wrapped else None) or e)}") from e
    for own in (config, text):
        for name in QUANTISATION_KEYS:
            if hasattr(own, name):
                delattr(own, name)
    check_supported(config)
    return config


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UserError, with model type and reason, if `config` shows that its model cannot be run in slices."""
    if (reason := reason_to_refuse(config)) is not None:
        raise unsupported(config, reason)


def reason_to_refuse(config: PreTrainedConfig) -> str | None:
    """Return why the model of `config` cannot be run in slices, or None if nothing is known against it."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder; expected a decoder-only language model"
    if model_class(config) is None:
        return "transformers has no causal language model for it"
    for layer, kind in enumerate(getattr(text_of(config), "layer_types", None) or ()):
        if kind not in ATTENTION_KINDS | OTHER_KINDS:
            known = ", ".join(sorted(ATTENTION_KINDS | OTHER_KINDS))
            return f"layer {layer} is {kind!r}; expected one of {known}"
    if (problem := ngrams_problem(text_of(config))) is not None:
        return problem
    if leaves_out_newest(text_of(config)):
        return "its indexers choose full pools of tokens alone; expected index_kpool_always_select_tail to be true"
    return None


def unsupported(config: PreTrainedConfig, reason: str) -> UserError:
    """Return the error for a model that is not supported."""
    return UserError(f"model type {config.model_type!r} is not supported: {reason}")


def _repeated(kinds: list[Any], config: PreTrainedConfig) -> list[Any]:
    """Return the kinds of layers as often as they run: some models go through some of them several times."""
    passes = getattr(config, "loop_num_passes", 1)
    if passes == 1:
        return kinds
    loop = slice(config.loop_layer_index_start, config.loop_layer_index_end)
    return kinds[: loop.start] + kinds[loop] * passes + kinds[loop.stop :]


def layer_types(config: PreTrainedConfig, layers: int) -> list[Any]:
    """Return the kind of attention of each layer; [] if none is stated.

    Args:
        config: Config of the language model.
        layers: Number of its layers.
    """
    stated = getattr(config, "layer_types", None)
    if stated is not None:
        return ["sliding_attention" if kind == SLIDING else kind for kind in _repeated(stated, config)]
    if (of_gpt_neo := getattr(config, "attention_layers", None)) is not None:
        return ["sliding_attention" if kind == "local" else "full_attention" for kind in of_gpt_neo]
    slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    return ["sliding_attention"] * layers if slides else []
