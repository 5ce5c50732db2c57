"""Which tensors of a checkpoint make up the weights of a model, by transformers' own conversion mapping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from copy import deepcopy
from typing import Any

import msgspec
import torch
from torch import Tensor

from hpcdecode.model.frontend.trace import skeleton


class Sources(msgspec.Struct, array_like=True):
    """By weight: a tensor of the checkpoint, or the experts' [out_j, in] pieces, or the weight that it is tied to."""

    keys: dict[str, str] = {}
    stacks: dict[str, list[list[str]]] = {}
    ties: dict[str, str] = {}
    conversions: list[Any] = []  # Conversion: what makes the others

    def uses(self) -> Iterator[tuple[str, str]]:
        """Yield every tensor of the checkpoint that is used, with the weight that it is or is a part of."""
        yield from ((key, name) for name, key in self.keys.items())
        yield from ((key, name) for name, experts in self.stacks.items() for keys in experts for key in keys)
        yield from ((key, conversion.names[0]) for conversion in self.conversions for key in conversion.takes())


class Conversion:
    """One of transformers' conversions, of certain tensors of a checkpoint into one or more of a model."""

    def __init__(self, name: str, converter, model: torch.nn.Module):
        self._name, self._converter, self._model = name, converter, model
        self._keys: dict[str, list[str]] = {}  # by pattern
        first, *others = converter.target_patterns
        self.names = [name, *(name.replace(first, other) for other in others)]

    def add(self, pattern: str, key: str) -> None:
        self._keys.setdefault(pattern, []).append(key)

    def takes(self) -> list[str]:
        """Return the tensors of the checkpoint that it takes."""
        return [key for keys in self._keys.values() for key in keys]

    def pieces(self) -> list[list[str]] | None:
        """For each expert the tensors that make up its weight along `out`, where that is all that it does."""
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in self._converter.operations]
        if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            return None
        columns = [self._keys[p] for p in self._converter.source_patterns if p in self._keys]
        return [list(keys) for keys in zip(*columns, strict=True)]

    def run(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """The weights by name; tensors: by key a function that returns it."""
        own = deepcopy(self._converter)
        for pattern, keys in self._keys.items():
            for key in keys:
                own.add_tensor(self._name, key, pattern, tensors[key])
        made = own.convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def find_sources(
    config, dtype: torch.dtype, keys: Iterable[str], wanted: Iterable[str], stackable: Iterable[str]
) -> Sources:
    """Where the weights and persistent buffers `wanted` of `config`'s model come from in a checkpoint of these `keys`.

    Experts' weights in `stackable` stay separate tensors. What the checkpoint lacks is left out.
    """
    model = skeleton(config, dtype)
    plain, converted = match_keys(keys, model)
    there, stackable, found = plain.keys() | converted.keys(), set(stackable), Sources()
    for name in sorted(wanted):
        held = held_name(name, there, model)
        if held is None:
            continue
        if held != name:
            found.ties[name] = held
        if held in plain:
            found.keys[held] = plain[held]
        elif held in stackable and (pieces := converted[held].pieces()):
            found.stacks[held] = pieces
        elif converted[held] not in found.conversions:
            found.conversions.append(converted[held])
    return found


def match_keys(keys: Iterable[str], model) -> tuple[dict[str, str], dict[str, Conversion]]:
    """By the model's tensors that the checkpoint holds: its key where it is there as it is, else how it is made."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    target = {**model.state_dict(keep_vars=True), **dict(model.named_parameters(remove_duplicate=False))}
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    plain: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, target)
        if name not in target and key in target:
            name, pattern = key, None
        if name not in target:
            continue
        if pattern is None:
            plain[name] = key
            continue
        if name not in conversions:
            conversions[name] = Conversion(name, by_pattern[pattern], model)
        conversions[name].add(pattern, key)
    return plain, {name: c for c in conversions.values() for name in c.names}


def held_name(name: str, held: Set[str], model) -> str | None:
    """`name`, or the tensor it is tied to, whichever is among those `held`."""
    if name in held:
        return name
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    root = tied.get(name, name)
    family = [root, *(k for k, v in tied.items() if v == root)]
    return next((n for n in family if n in held), None) if root != name or name in tied.values() else None
