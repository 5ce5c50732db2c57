"""The bytes of a model's weights in memory, by the headers of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from hpcdecode.model.frontend.checkpoint import holds_weights
from hpcdecode.model.frontend.config import stated_config
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.model.frontend.ngrams import TABLE
from hpcdecode.model.frontend.quantization.stated import read_scheme
from hpcdecode.model.lower.few_bits import ALL_FORMS, BLOCK_INPUTS
from hpcdecode.model.run.load import open_plain
from hpcdecode.model.run.split_model import AUTO
from hpcdecode.model.run.values import takes_form

BITS = {"int8": 8.0, **{name: form.bits for name, form in ALL_FORMS.items()}}  # of a weight


def weight_bytes(folder: Path, dtype: torch.dtype, quantised: str | None = None, device: str = "cpu") -> int:
    """Return the bytes of a checkpoint's tensors, 0 if it has none; only the headers of its files are read.

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
        return 0
    tensors = open_plain(folder, None, read_scheme(folder), dtype)
    vocabulary = _vocabulary(stated_config(folder))
    bits = 0.0
    for key, tensor in tensors.items():
        name = None if TABLE in key else quantised
        if name == AUTO:
            name = tensor.few_bits().either
        takes = name in ALL_FORMS and takes_form(name, dtype, torch.device(device))
        held = takes and _takes_few_bits(tensor.shape, vocabulary)
        each = BITS[name] if name == "int8" or (name is not None and held) else 8.0 * dtype.itemsize
        bits += each * math.prod(tensor.shape)
    return int(bits / 8)


def _takes_few_bits(shape: Sequence[int], vocabulary: Collection[object]) -> bool:
    """Return whether a weight [out, in], or one of experts, [E, out, in] or [E, in, out], is packed in few bits."""
    whole = all(size % BLOCK_INPUTS == 0 for size in shape[1:])
    return whole and (len(shape) == 3 or (len(shape) == 2 and shape[0] not in vocabulary))


def _vocabulary(config: Mapping[str, object]) -> set[object]:
    """Return the sizes of vocabularies that a config states, of the text model's too if it names one."""
    text = config.get("text_config")
    return {c.get("vocab_size") for c in (config, text) if isinstance(c, Mapping)}
