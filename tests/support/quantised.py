"""Tiny quantised checkpoints, each beside the checkpoint of the weights that it stands for, and the logits of both."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.quantization import plain
from hpcdecode.model.frontend.quantization.stated import read_scheme
from hpcdecode.model.run.load import ModelPart
from tests.support.gguf_logits import expanded
from tests.support.steps import Attention, step

PROJECTIONS = re.compile(r"model\.layers\.\d+\..*proj\.weight")
Stored = tuple[dict[str, Tensor], Tensor]  # tensors by what their keys end with, and the weight that they stand for


class Pair(NamedTuple):
    """A quantised checkpoint, and the checkpoint of the weights that it stands for."""

    quantised: Path
    plain: Path


def pair(
    source: Path,
    folder: Path,
    quantise: Callable[[str, Tensor], Stored],
    stated: dict[str, object],
    chosen: re.Pattern[str] = PROJECTIONS,
    under: str = "quantization_config",
) -> Pair:
    """Quantise the weights of a checkpoint.

    Args:
        source: The checkpoint.
        folder: Where to make the two.
        quantise: Returns what stands for a weight, given its key without "weight" at the end, and the weight.
        stated: What config.json states of it.
        chosen: Keys of the weights.
        under: Key of `stated` in config.json, or the name of a file that is it.
    """
    made = Pair(*(Path(shutil.copytree(source, folder / name)) for name in Pair._fields))
    given = load_file(source / "model.safetensors")
    quantised, plain = dict(given), dict(given)
    for key in filter(chosen.fullmatch, given):
        stem = key.removesuffix("weight")
        tensors, plain[key] = quantise(stem, quantised.pop(key))
        quantised.update({stem + name: tensor for name, tensor in tensors.items()})
    write(made.quantised, quantised)
    write(made.plain, plain)
    state(made.quantised, stated, under)
    return made


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of a checkpoint."""
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors", {"format": "pt"})


def state(path: Path, stated: dict[str, object], under: str = "quantization_config") -> None:
    """State a quantisation in a model directory."""
    if under.endswith(".json"):
        (path / under).write_text(json.dumps(stated))
    else:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, under: stated}))


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    write(path, tensors)


def logits(path: Path, dtype: str = "float32") -> Tensor:
    """Return the logits of some tokens by hpcdecode."""
    model = load_split(path, dtype=dtype)
    return step(
        model, Attention(model), [(0, i, int(token)) for i, token in enumerate(TOKENS)], list(range(len(TOKENS)))
    )


def kept(path: Path, dtype: str, quantised: str = "auto") -> set[str | None]:
    """Return the forms of few bits that weights keep, after a check that logits are those of dequantised ones."""
    wanted, model = load_split(path, dtype=dtype), load_split(path, dtype=dtype, quantised=quantised)
    rows = [(0, i, int(token)) for i, token in enumerate(TOKENS)]
    a, b = (step(m, Attention(m), rows, list(range(len(TOKENS)))) for m in (wanted, model))
    assert torch.equal(a, b)
    return set(forms(model))


def check_parts(path: Path) -> None:
    """Check that members of tensor and expert parallelism keep the numbers of the parts of dequantised weights."""
    for part in (ModelPart(2, 0), ModelPart(2, 1), ModelPart(2, 1, ep=True)):
        wanted, model = (load_split(path, dtype="float32", quantised=q, part=part) for q in (None, "auto"))
        assert expanded(model) == expanded(wanted)


def forms(model: SplitModel) -> list[str | None]:
    """Return the forms of all packed weights."""
    return [r.bits for s in model._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed]


def reference(path: Path) -> Tensor:
    """Return the same by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def check(made: Pair) -> None:
    """Check that hpcdecode reads a checkpoint's weights, whole and in parts, and computes transformers' logits."""
    expected = load_file(made.plain / "model.safetensors")
    with mock.patch.multiple(plain, ELEMENTS_AT_ONCE=1, LARGE_BYTES=1):
        for key, weight in weights(made.quantised).items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6)
    wanted = reference(made.plain)
    torch.testing.assert_close(logits(made.quantised), wanted, rtol=0, atol=1e-4)
    assert wanted.std() > 0.1


def weights(path: Path) -> dict[str, Tensor]:
    """Return the quantised weights of a checkpoint in float32, by key."""
    tensors = plain.plain_tensors(open_checkpoint(path), read_scheme(path), torch.float32)
    return {key: stored() for key, stored in tensors.items() if isinstance(stored, plain.DequantisedTensor)}


TOKENS = torch.arange(24) * 17 % 500
