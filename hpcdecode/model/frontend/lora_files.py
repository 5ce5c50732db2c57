"""What a directory of PEFT's format holds of a LoRA adapter: its statement and its tensors, both untrusted."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.adapter_files import CONFIG, WEIGHTS
from hpcdecode.model.frontend.checkpoint import stored_tensors
from hpcdecode.model.frontend.config import read_json
from hpcdecode.model.frontend.tensors import StoredTensor

PREFIX = "base_model.model."
UPDATE = re.compile(r"base_model\.model\.(.{1,500})\.lora_(?:([AB])\.weight|(magnitude_vector)(?:\.weight)?)")
WHOLE = re.compile(r"base_model\.model\.((?:(?!lora_).){1,500}\.(?:weight|bias))")
WRAPPED = ".base_layer"  # what PEFT calls a module inside the one that updates it
MOST_RANK = 1 << 16
FLOATS = frozenset({"F32", "F16", "BF16"})
KNOWN = frozenset(  # statements that leave an adapter what is merged here, or are read here
    {"peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"}
    | {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias"}
    | {"target_modules", "target_parameters", "modules_to_save", "exclude_modules", "layers_to_transform"}
    | {"layers_pattern", "init_lora_weights", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"}
    | {"runtime_config", "ephemeral_gpu_offload"}
)
BIASES = ("none", "all", "lora_only")  # which biases were trained, too
KEEP_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")  # init_lora_weights; others change the model


class AdapterFile(NamedTuple):
    """What an adapter's files hold.

    Attributes:
        folder: Its directory.
        stated: What adapter_config.json states.
        parts: Tensors "A", "B" and "magnitude_vector" of every module that is updated, by the module's name. Modules
            that PEFT has wrapped twice, for two parameters of one module, end in WRAPPED.
        whole: Tensors that take the place of the model's, by their keys.
    """

    folder: Path
    stated: Mapping[str, Any]
    parts: dict[str, dict[str, StoredTensor]]
    whole: dict[str, StoredTensor]

    def scale(self, module: str) -> float:
        """Return what B A of a module is multiplied by."""
        rank, alpha = self.rank(module), self._by_pattern("alpha_pattern", module, self.stated.get("lora_alpha"))
        if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
            raise refused(self.folder, f"lora_alpha to be a finite number, got {alpha!r:.50}")
        return float(alpha / (math.sqrt(rank) if self.stated.get("use_rslora") else rank))

    def rank(self, module: str) -> int:
        """Return the rank of the update of a module."""
        rank = self._by_pattern("rank_pattern", module, self.stated.get("r"))
        if type(rank) is not int or not 1 <= rank <= MOST_RANK:
            raise refused(self.folder, f"a rank from 1 to {MOST_RANK}, got {rank!r:.50}")
        return rank

    def _by_pattern(self, name: str, module: str, default: object) -> Any:
        """Return a module's value in a table of patterns, as PEFT finds it: the name's end after a dot, or `default`.

        Patterns are taken as text, since regular expressions of an untrusted file may take forever.
        """
        table = self.stated.get(name) or {}
        if not isinstance(table, dict):
            raise refused(self.folder, f"{name} to be an object, got {table!r:.100}")
        for pattern, value in table.items():
            plain = pattern.removeprefix("^")
            if re.search(r"[^\w.]", plain):
                raise refused(self.folder, f"names of modules in {name}, got {pattern!r:.200}")
            if module == plain or (plain == pattern and module.endswith(f".{plain}")):
                return value
        return default


def read_adapter(folder: Path) -> AdapterFile:
    """Return what an adapter's files hold; tensors are read when they are asked for.

    Raises:
        UserError: If it is of a kind that is not merged, or damaged.
    """
    stated = plain_statement(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = " (adapter_model.bin is pickled, which may run code: save it as safetensors)"
        raise refused(folder, f"{WEIGHTS}, got none{pickled if (folder / 'adapter_model.bin').exists() else ''}")
    made = AdapterFile(folder, stated, {}, {})
    for key, stored in stored_tensors(file).items():
        if (match := UPDATE.fullmatch(key)) is not None:
            made.parts.setdefault(match[1], {})[match[2] or match[3]] = stored
        elif (match := WHOLE.fullmatch(key)) is not None:
            made.whole[match[1].replace(WRAPPED, "")] = stored
        else:
            raise refused(folder, f"tensors named {PREFIX}MODULE.lora_A.weight and .lora_B.weight, got {key!r:.200}")
    if not made.parts and not made.whole:
        raise refused(folder, f"an adapter with weights, got none in {WEIGHTS}")
    return made


def plain_statement(folder: Path) -> dict[str, Any]:
    """Return what adapter_config.json states. Raise UserError if that is not a LoRA adapter that can be merged."""
    if not folder.is_dir():
        raise UserError(f"--lora {folder}: expected the directory of a PEFT adapter, found none", everywhere=True)
    stated = read_json(folder / CONFIG)
    if not stated:
        raise refused(folder, f"a file {CONFIG}, got none")
    if stated.get("peft_type") != "LORA":
        raise refused(folder, f"an adapter of type LORA, got {stated.get('peft_type')!r:.50}")
    for name in sorted(stated.keys() - KNOWN):
        if stated[name]:
            raise refused(folder, f"no {name:.100}, got {stated[name]!r:.100}")
    if stated.get("init_lora_weights") not in KEEP_WEIGHTS:
        raise refused(folder, f"init_lora_weights that keep the model's, got {stated['init_lora_weights']!r:.50}")
    if stated.get("bias", "none") not in BIASES:
        raise refused(folder, f"bias to be one of {', '.join(BIASES)}, got {stated['bias']!r:.50}")
    targets = stated.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise refused(folder, f"target_parameters to be names, got {targets!r:.100}")
    return stated


def refused(folder: Path, expected: str) -> UserError:
    """Return the error for an adapter that cannot be merged."""
    return UserError(f"--lora {folder}: expected {expected}; merge it into the model with PEFT, or mend it")
