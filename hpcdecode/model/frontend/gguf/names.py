"""What the names of a GGUF file's tensors mean, given the names of an architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hpcdecode.model.frontend.gguf.changes import Changes, Values, unchanged


class Experts(NamedTuple):
    """A tensor of all experts of a layer, which a GGUF file holds as one or more tensors of all experts.

    Attributes:
        key: Its key in a layer.
        modules: Modules in GGUF whose outputs it has.
        interleaved: Whether outputs of the modules are in turn, not one module's behind the other's.
        by_column: Whether it is [E, in, out].
        biased: Whether there is another tensor of the modules' biases, whose key ends in _bias.
    """

    key: str
    modules: tuple[str, ...]
    interleaved: bool = False
    by_column: bool = False
    biased: bool = False


class Layout(NamedTuple):
    """How rows of several tensors make up one.

    Attributes:
        groups: Groups of its rows. Each has as many rows of every run.
        runs: Numbers of rows of the runs that the first tensors consist of. Others are one run.
        turned: Numbers of the tensors whose matrices are transposed.
    """

    groups: int = 1
    runs: tuple[tuple[int, ...], ...] = ()
    turned: tuple[int, ...] = ()


class Joined(NamedTuple):
    """A matrix of the checkpoint, which a GGUF file holds as several tensors.

    Attributes:
        key: Its key in a layer.
        modules: Modules in GGUF whose rows it has.
        layout: Returns how, given the metadata.
        biased: As of Experts.
    """

    key: str
    modules: tuple[str, ...]
    layout: Callable[[Values], Layout]
    biased: bool = False


class NameTable(NamedTuple):
    """The names of an architecture's modules.

    Attributes:
        config: Its model type in transformers.
        top: Modules outside of layers, by their names in GGUF.
        layer: Modules of a layer, likewise.
        prefix: What the names of a layer's modules begin with, before its number.
        change: Returns what differs in the tensor of a name.
        parameters: Keys of a layer's tensors that are no weight or bias of a module, by their names in GGUF.
        wholes: Tensors of the checkpoint's layers that are several in GGUF.
        biases: Modules of a layer in GGUF that may have a bias, or None for all.
    """

    config: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str = "model.layers"
    change: Changes = unchanged
    parameters: Mapping[str, str] = MappingProxyType({})
    wholes: tuple[Experts | Joined, ...] = ()
    biases: frozenset[str] | None = None


class GgufPart(NamedTuple):
    """What a tensor of a GGUF file is of one of the checkpoint.

    Attributes:
        key: Key of that tensor.
        number: Number of the part.
        names: Names of the tensors of all parts.
        whole: How they make it up.
    """

    key: str
    number: int
    names: tuple[str, ...]
    whole: Experts | Joined


LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
NAME = re.compile(r"(\w+(?:\.\w+)?)\.(weight|bias)")
IN_CONFIG = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")  # follow from the config
PREDICTING = {  # modules of a layer for multi-token prediction, beside those of a layer
    **{"nextn.enorm": "enorm", "nextn.hnorm": "hnorm", "nextn.eh_proj": "eh_proj"},
    "nextn.shared_head_norm": "shared_head.norm",
}


def is_left_out(name: str) -> bool:
    """Return whether a tensor is not read, as its values follow from the config."""
    return IN_CONFIG.fullmatch(name) is not None


def predicts(name: str, values: Values) -> bool:
    """Return whether a tensor is of a layer for multi-token prediction."""
    layer, blocks, predict = LAYER.fullmatch(name), values.get("block_count"), values.get("nextn_predict_layers")
    if layer is None or not isinstance(blocks, int) or not isinstance(predict, int):
        return False
    return int(layer[1]) >= blocks - predict


def key_of(table: NameTable, name: str) -> str | None:
    """Return the checkpoint's key of a tensor, with {} for the number of an expert; None if it has none."""
    layer = LAYER.fullmatch(name)
    own = name if layer is None else layer[2]
    if layer is not None and own in table.parameters:
        return f"{table.prefix}.{int(layer[1])}.{table.parameters[own]}"
    if (match := NAME.fullmatch(own)) is None:
        return None
    module, leaf = match.groups()
    if layer is None:
        return f"{table.top[module]}.{leaf}" if module in table.top else None
    if module in PREDICTING:
        return f"{table.prefix}.{int(layer[1])}.{PREDICTING[module]}.{leaf}"
    if module not in table.layer or (leaf == "bias" and table.biases is not None and module not in table.biases):
        return None
    return f"{table.prefix}.{int(layer[1])}.{table.layer[module]}.{leaf}"


def part_of(table: NameTable, name: str) -> GgufPart | None:
    """Return what a tensor is of one that is several in GGUF; None if it is of none."""
    layer = LAYER.fullmatch(name)
    match = NAME.fullmatch(layer[2]) if layer is not None else None
    if layer is None or match is None:
        return None
    module, leaf = match.groups()
    for whole in table.wholes:
        if module in whole.modules and (leaf == "weight" or whole.biased):
            own = f"{table.prefix}.{int(layer[1])}.{whole.key}{'_bias' if leaf == 'bias' else ''}"
            names = tuple(f"blk.{layer[1]}.{each}.{leaf}" for each in whole.modules)
            return GgufPart(own, whole.modules.index(module), names, whole)
    return None
