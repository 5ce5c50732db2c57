"""Which tensors of a checkpoint make up the weights of a model, by transformers' own conversion mapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.expert_loops import spare_experts
from hpcdecode.model.frontend.skeleton import skeleton
from hpcdecode.model.frontend.tensors import CheckpointTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform


class Conversion:
    """One of transformers' conversions, of some tensors of a checkpoint into one or more of a model.

    Args:
        name: Name of the tensor that it makes, the first if it makes several.
        converter: Converter of transformers.
        model: Model that the converter reads shapes from.

    Attributes:
        names: Names of all tensors that it makes.
    """

    def __init__(self, name: str, converter: WeightConverter, model: PreTrainedModel):
        self._name, self._converter, self._model = name, converter, model
        self._keys: dict[str, list[str]] = {}  # by pattern
        first, *others = converter.target_patterns
        self.names = [name, *(name.replace(first, other) for other in others)]

    def add(self, pattern: str, key: str) -> None:
        """Take the tensor `key` of the checkpoint, which matches `pattern`, as well."""
        self._keys.setdefault(pattern, []).append(key)

    def takes(self) -> list[str]:
        """Return the tensors of the checkpoint that it takes."""
        return [key for keys in self._keys.values() for key in keys]

    def pieces(self) -> list[list[str]] | None:
        """Return for each expert the tensors that make up its weight along `out`; None if it does more than that."""
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in self._converter.operations]
        if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            return None
        columns = [self._keys[p] for p in self._converter.source_patterns if p in self._keys]
        return [list(keys) for keys in zip(*columns, strict=True)]

    def joined(self) -> list[str] | None:
        """Return the tensors that lie one below the other in the weight; None if it does more than that."""
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in self._converter.operations]
        if steps != [("Concatenate", 0)]:
            return None
        return [key for p in self._converter.source_patterns for key in self._keys.get(p, [])]

    def merged(self) -> list[list[str]]:
        """Return the tensors that it stacks, one of each expert, by pattern."""
        merges = any(type(op).__name__ == "MergeModulelist" for op in self._converter.operations)
        return list(self._keys.values()) if merges else []

    def run(self, tensors: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
        """Return the weights that it makes, by name; tensors: by key a function that returns the tensor."""
        own = deepcopy(self._converter)
        add: Callable[..., None] = own.add_tensor  # takes a function in place of its future
        for pattern, keys in self._keys.items():
            for key in keys:
                add(self._name, key, pattern, tensors[key])
        convert: Callable[..., dict[str, Tensor | list[Tensor]]] = own.convert
        made = convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def expert_numbers(keys: Sequence[str]) -> list[int]:
    """Return the numbers of experts that `keys`, of one weight of each, have: the numbers in which they differ."""
    fields = zip(*(map(int, re.findall(r"\d+", key)) for key in keys), strict=True)
    varying = [field for field in fields if len(set(field)) > 1]
    return list(varying[0]) if varying else list(range(len(keys)))


class Sources(msgspec.Struct, array_like=True):
    """Where the weights of a model come from.

    Attributes:
        keys: Key of the tensor that a weight is, by weight.
        stacks: Keys of the [out_j, in] tensors of each expert that make up a weight, by weight.
        ties: Weight that a weight shares its tensor with, by weight.
        conversions: Conversions that make the other weights. Sources that have any are never stored.
        joined: Keys of the tensors that lie one below the other in a weight, by weight.
    """

    keys: dict[str, str] = {}
    stacks: dict[str, list[list[str]]] = {}
    ties: dict[str, str] = {}
    conversions: list[Conversion] = []
    joined: dict[str, list[str]] = {}

    def uses(self) -> Iterator[tuple[str, str]]:
        """Yield every tensor of the checkpoint that is used, with the weight that it is or is a part of."""
        yield from ((key, name) for name, key in self.keys.items())
        yield from ((key, name) for name, experts in self.stacks.items() for keys in experts for key in keys)
        yield from ((key, name) for name, keys in self.joined.items() for key in keys)
        yield from ((key, conversion.names[0]) for conversion in self.conversions for key in conversion.takes())

    def pieces(self, name: str) -> list[list[str]] | None:
        """Return for each expert the tensors that make up a weight along `out`; None if it is not made of such."""
        found = self.stacks.get(name)
        made = (c.pieces() for c in self.conversions if c.names == [name])
        return next(made, None) if found is None else found

    def rows_of_experts(
        self, name: str, experts: int, tensors: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, int, slice]] | None:
        """Return the keys of the tensors that make up a weight of experts, with the expert and its rows [out].

        Args:
            name: Name of the weight.
            experts: Number of experts; a checkpoint may hold more.
            tensors: Tensors of the checkpoint by their keys.

        Returns:
            None if the weight is not made of tensors of each expert.
        """
        pieces = self.pieces(name)
        return None if pieces is None else _rows_of_experts(pieces[:experts], tensors)


def _rows_of_experts(
    pieces: Sequence[Sequence[str]], tensors: Mapping[str, CheckpointTensor]
) -> Iterator[tuple[str, int, slice]]:
    for e, keys in enumerate(pieces):
        first = 0
        for key in keys:
            last = first + tensors[key].shape[0]
            yield key, e, slice(first, last)
            first = last


def find_sources(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    keys: Iterable[str],
    wanted: Iterable[str],
    stackable: Iterable[str],
) -> Sources:
    """Return where the weights of a model come from in a checkpoint. Weights that it lacks are left out.

    Args:
        config: Config of the model.
        dtype: Dtype of its parameters.
        keys: Keys of the checkpoint's tensors.
        wanted: Names of parameters and persistent buffers of the model.
        stackable: Weights of experts that may stay separate tensors.

    Raises:
        UserError: If the checkpoint lacks tensors of an expert.
    """
    model = skeleton(config, dtype)
    return chosen_sources(model, match_keys(keys, model), wanted, stackable)


def chosen_sources(
    model: PreTrainedModel, matched: MatchedKeys, wanted: Iterable[str], stackable: Iterable[str]
) -> Sources:
    """Return of the tensors that a checkpoint holds of a model those that are wanted, as `find_sources`."""
    held, stackable, found = matched.names(), set(stackable), Sources()
    for name in sorted(wanted):
        source = held_name(name, held, model)
        if source is None:
            continue
        if source != name:
            found.ties[name] = source
        if source in matched.plain:
            found.keys[source] = matched.plain[source]
            continue
        conversion = matched.conversions[source]
        experts = require_experts(model, source, conversion) if conversion.merged() else None
        if source in stackable and (pieces := conversion.pieces()):
            found.stacks[source] = pieces[:experts]
        elif (parts := conversion.joined()) is not None:
            found.joined[source] = parts
        elif conversion not in found.conversions:
            found.conversions.append(conversion)
    return found


def require_experts(model: PreTrainedModel, name: str, conversion: Conversion) -> int:
    """Return how many experts the weight `name` of `model` has.

    Raises:
        UserError: If `conversion`, which makes it, lacks tensors of one: those behind it would be taken for others.
    """
    experts, spare = len(model.get_parameter(name)), spare_experts(model.get_submodule(name.rpartition(".")[0]))
    for keys in conversion.merged():
        numbers, expected = set(expert_numbers(keys)), set(range(experts))
        if numbers not in (expected, set(range(experts + spare))):
            lacks = min(expected - numbers, default=None)
            found = f"none of expert {lacks}" if lacks is not None else f"{len(keys)} of them"
            raise UserError(
                f"{name}: expected tensors like {keys[0]!r} of experts 0 to {experts - 1}, got {found}: the checkpoint "
                "is incomplete, or belongs to another config.json"
            )
    return experts


class MatchedKeys(NamedTuple):
    """The tensors of a model that a checkpoint holds.

    Attributes:
        plain: Key of a tensor that the checkpoint has as it is, by its name in the model.
        conversions: Conversion that makes one of the others, by its name in the model.
    """

    plain: dict[str, str]
    conversions: dict[str, Conversion]

    def names(self) -> Set[str]:
        """Return the model's names of all of them."""
        return self.plain.keys() | self.conversions.keys()


def match_keys(
    keys: Iterable[str], model: PreTrainedModel, mapping: Sequence[WeightTransform] | None = None
) -> MatchedKeys:
    """Return which tensors of a model a checkpoint holds, and how.

    Args:
        keys: Keys of the checkpoint's tensors.
        model: The model.
        mapping: How keys become names; None for what transformers has for the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    target = {**model.state_dict(keep_vars=True), **dict(model.named_parameters(remove_duplicate=False))}
    mapping = get_model_conversion_mapping(model) if mapping is None else mapping
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    order: Callable[[str], tuple[object, ...]] = dot_natural_key
    plain: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for key in sorted(keys, key=order):
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
    return MatchedKeys(plain, {name: c for c in conversions.values() for name in c.names})


def held_name(name: str, held: Set[str], model: PreTrainedModel) -> str | None:
    """Return `name`, or a tensor that it is tied to, whichever is among those `held`; None if none is."""
    if name in held:
        return name
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    root = tied.get(name, name)
    if root == name and name not in tied.values():
        return None
    candidates = [root, *(k for k, v in tied.items() if v == root)]
    return next((n for n in candidates if n in held), None)
