"""The bytes of a model's weights in memory, by the headers of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hpcdecode.model.frontend.checkpoint import holds_weights
from hpcdecode.model.frontend.config import stated_config
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.model.frontend.ngrams import TABLE
from hpcdecode.model.frontend.quantization.stated import read_scheme
from hpcdecode.model.lower.few_bits import ALL_FORMS, BLOCK_INPUTS
from hpcdecode.model.run.checkpoint_weights import open_plain
from hpcdecode.model.run.split_model import AUTO
from hpcdecode.model.run.values import takes_form

BITS = {"int8": 8.0, **{name: form.bits for name, form in ALL_FORMS.items()}}  # of a weight


class HeldTensor(NamedTuple):
    """A tensor of a checkpoint, as it is held.

    Attributes:
        key: Its name.
        shape: Its shape.
        bits: Of an element, with its share of the scales.
        whole: Whether it has a row for each token of a vocabulary, as embeddings and LM heads do.
    """

    key: str
    shape: tuple[int, ...]
    bits: float
    whole: bool


def weight_bytes(folder: Path, dtype: torch.dtype, quantised: str | None = None, device: str = "cpu") -> int:
    """Return the bytes of a checkpoint's tensors, 0 if it has none, of the arguments of `held_tensors`.

    Raises:
        UserError: If the checkpoint is incomplete or damaged.
    """
    held = held_tensors(folder, dtype, quantised, device)
    return int(sum(each.bits * math.prod(each.shape) for each in held) / 8)


def held_tensors(
    folder: Path, dtype: torch.dtype, quantised: str | None = None, device: str = "cpu"
) -> Iterator[HeldTensor]:
    """Yield a checkpoint's tensors, none if it has no weights; only the headers of its files are read.

    Args:
        folder: Model directory.
        dtype: Dtype of the weights that are not quantised.
        quantised: What projections are quantised to, as `load_split` takes it. All matrices, of experts too, but those
            with as many rows as the vocabulary, and tables of several tokens, count as projections.
        device: Of the slices.

    Raises:
        UserError: If the checkpoint is incomplete or damaged.
    """
    folder = model_folder(folder)
    if not holds_weights(folder):
        return
    tensors = open_plain(folder, None, read_scheme(folder), dtype)
    vocabulary = _vocabulary(stated_config(folder))
    for key, tensor in tensors.items():
        name = None if TABLE in key else quantised
        if name == AUTO:
            name = tensor.few_bits().either
        shape, bits = tuple(tensor.shape), 8.0 * dtype.itemsize
        whole = len(shape) == 2 and shape[0] in vocabulary
        if name is not None and len(shape) in (2, 3) and not whole and _takes(name, shape, dtype, device):
            bits = BITS[name]
        yield HeldTensor(key, shape, bits, whole)


def _takes(name: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> bool:
    """Return whether a weight [out, in], or one of experts, [E, out, in] or [E, in, out], is packed in a form."""
    if name not in ALL_FORMS:
        return name == "int8"
    return takes_form(name, dtype, torch.device(device)) and all(size % BLOCK_INPUTS == 0 for size in shape[1:])


def _vocabulary(config: Mapping[str, object]) -> set[object]:
    """Return the sizes of vocabularies that a config states, of the text model's too if it names one."""
    text = config.get("text_config")
    return {c.get("vocab_size") for c in (config, text) if isinstance(c, Mapping)}
