"""A LoRA adapter, merged into each weight when it is read: w + scale * B A, in float32.

A directory of PEFT's format holds it: adapter_config.json and adapter_model.safetensors, both untrusted.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021); Kalajdzievski, "A Rank Stabilization
Scaling Factor for Fine-Tuning with LoRA" (2023), for rsLoRA.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.adapter_files import CONFIG, WEIGHTS
from hpcdecode.model.frontend.checkpoint import stored_tensors
from hpcdecode.model.frontend.config import read_json
from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.tensors import CheckpointTensor, StoredTensor

PREFIX = "base_model.model."
KEY = re.compile(r"base_model\.model\.(.{1,500})\.lora_([AB])\.weight")
MOST_RANK = 1 << 16
FLOATS = frozenset({"F32", "F16", "BF16"})
KNOWN = frozenset(  # statements that leave an adapter w + scale * B A, or are read here
    {"peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"}
    | {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "bias", "lora_dropout"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"}
    | {"megatron_core", "qalora_group_size", "eva_config", "runtime_config", "ephemeral_gpu_offload"}
)
KEEP_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")  # init_lora_weights; others change the model


class LoraUpdate(NamedTuple):
    """What an adapter adds to a weight.

    Attributes:
        a: A, [rank, in].
        b: B, [out, rank].
        scale: What B A is multiplied by.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float

    def shape(self, turned: bool) -> tuple[int, int]:
        """Return the shape of the weight, [out, in], or [in, out] if it is stored turned."""
        outputs, inputs = self.b.shape[0], self.a.shape[1]
        return (inputs, outputs) if turned else (outputs, inputs)

    def __call__(self) -> Tensor:
        """Return scale * B A in float32, [out, in]."""
        return (self.b().float() @ self.a().float()).mul_(self.scale)


class MergedTensor:
    """A tensor of a checkpoint with an adapter's update.

    Attributes:
        mapped: File that holds the tensor of the checkpoint.
        dtype: Name of its dtype in safetensors: that of float32.
        shape: Its shape.
    """

    __slots__ = ("_folder", "_module", "_stored", "_turned", "_update", "dtype", "mapped", "shape")

    def __init__(self, stored: CheckpointTensor, update: LoraUpdate, turned: bool, folder: Path, module: str):
        self._stored, self._update, self._turned = stored, update, turned
        self._folder, self._module = folder, module
        self.mapped, self.dtype, self.shape = stored.mapped, "F32", stored.shape

    def __call__(self) -> Tensor:
        """Read the tensor and add the update, in float32.

        Raises:
            UserError: If the update has numbers that are not finite.
        """
        update = self._update()
        if not update.isfinite().all():
            scale = self._update.scale
            raise refused(
                self._folder, f"finite numbers, got others in an update of {self._module!r:.200} times {scale:.4g}"
            )
        return torch.add(self._stored().float(), update.t() if self._turned else update)

    def few_bits(self) -> Held:
        """Return that nothing holds its numbers in fewer bits."""
        return NOT_HELD


def merged(
    tensors: Mapping[str, CheckpointTensor], sources: Sources, turned: Collection[str], folder: Path
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint with an adapter merged into them, which happens when they are read.

    Args:
        tensors: Tensors by the keys of the checkpoint, unquantised.
        sources: Which of them make up each weight of the model.
        turned: Names of the weights that the model stores as [in, out]. As in PEFT it is the model that decides,
            whatever `fan_in_fan_out` says.
        folder: Directory of the adapter.

    Raises:
        UserError: If the adapter is of a kind that is not merged, damaged, or of another model.
    """
    uses = {key for key, _ in sources.uses()}
    tied = {sources.keys[root] for root in sources.ties.values() if root in sources.keys}
    found = dict(tensors)
    for module, update in read_updates(folder).items():
        name = f"{module}.weight"
        key = sources.keys.get(name, name)
        if name in sources.ties or key in tied:
            raise refused(folder, f"weights of one use each, got {module!r:.200}, which is tied to another weight")
        if key not in uses:
            raise refused(folder, f"weights of the model, got {module!r:.200}, which it does not have")
        expected, is_turned = tensors[key].shape, name in turned
        if expected != update.shape(is_turned):
            shape = list(update.shape(is_turned))
            raise refused(folder, f"{module!r:.200} of shape {list(expected)}, got an update of {shape}")
        found[key] = MergedTensor(tensors[key], update, is_turned, folder, module)
    return found


def read_updates(folder: Path) -> dict[str, LoraUpdate]:
    """Return what an adapter adds to the weights, by module.

    Raises:
        UserError: If it is of a kind that is not merged, or damaged.
    """
    stated = plain_statement(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = " (adapter_model.bin is pickled, which may run code: save it as safetensors)"
        raise refused(folder, f"{WEIGHTS}, got none{pickled if (folder / 'adapter_model.bin').exists() else ''}")
    parts: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in stored_tensors(file).items():
        match = KEY.fullmatch(key)
        if match is None:
            raise refused(folder, f"tensors named {PREFIX}MODULE.lora_A.weight and .lora_B.weight, got {key!r:.200}")
        parts.setdefault(match[1], {})[match[2]] = stored
    if not parts:
        raise refused(folder, f"an adapter with weights, got none in {WEIGHTS}")
    return {module: update_of(folder, stated, module, own) for module, own in parts.items()}


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
    if stated.get("bias", "none") != "none":
        raise refused(folder, f"bias none, got {stated['bias']!r:.50}")
    return stated


def update_of(folder: Path, stated: Mapping[str, Any], module: str, own: Mapping[str, StoredTensor]) -> LoraUpdate:
    """Return what an adapter adds to the weight of a module, of its tensors A and B."""
    if own.keys() != {"A", "B"}:
        raise refused(folder, f"lora_A and lora_B of {module!r:.200}, got lora_{'+'.join(own)} alone")
    a, b = own["A"], own["B"]
    rank = pattern_value(folder, stated, "rank_pattern", module, stated.get("r"))
    alpha = pattern_value(folder, stated, "alpha_pattern", module, stated.get("lora_alpha"))
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise refused(folder, f"a rank from 1 to {MOST_RANK}, got {rank!r:.50}")
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        raise refused(folder, f"lora_alpha to be a finite number, got {alpha!r:.50}")
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank
    if not fits or a.dtype not in FLOATS or b.dtype not in FLOATS:
        raise refused(
            folder,
            f"{module!r:.200} with A [{rank}, in] and B [out, {rank}] of floating point, got {a.dtype} "
            f"{list(a.shape)} and {b.dtype} {list(b.shape)}",
        )
    scale = alpha / (math.sqrt(rank) if stated.get("use_rslora") else rank)
    return LoraUpdate(a, b, scale)


def pattern_value(folder: Path, stated: Mapping[str, Any], name: str, module: str, default: object) -> Any:
    """Return a module's value in a table of patterns, as PEFT finds it: the name's end after a dot, else `default`.

    Patterns are taken as text, since regular expressions of an untrusted file may take forever.
    """
    table = stated.get(name) or {}
    if not isinstance(table, dict):
        raise refused(folder, f"{name} to be an object, got {table!r:.100}")
    for pattern, value in table.items():
        plain = pattern.removeprefix("^")
        if re.search(r"[^\w.]", plain):
            raise refused(folder, f"names of modules in {name}, got {pattern!r:.200}")
        if module == plain or (plain == pattern and module.endswith(f".{plain}")):
            return value
    return default


def refused(folder: Path, expected: str) -> UserError:
    """Return the error for an adapter that cannot be merged."""
    return UserError(f"--lora {folder}: expected {expected}; merge it into the model with PEFT, or mend it")
