"""Checkpoints of whole models, towers too, and their logits beside those of the slices."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hpcdecode.model import SplitModel
from hpcdecode.model.frontend.architectures import model_class
from tests.support.models import random_model
from tests.support.steps import Attention, step

LENGTHS = (130, 37)  # tokens of the sequences; the first is longer than the windows


def save_whole(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Write a random checkpoint of the model of `config` and return the model as transformers reads it."""
    kind = model_class(config)
    model = random_model(lambda: kind._from_config(config, dtype=torch.float32), 0)
    model.save_pretrained(folder)
    return read_whole(kind, folder)


def read_whole(kind: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def of_text(whole: PreTrainedModel) -> PreTrainedModel:
    """Return what computes the logits of text."""
    if whole.config.model_type == "llama4":
        return whole.language_model  # without images the whole ends in an AttributeError
    return whole


def random_ids(lengths: tuple[int, int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 440, (n,), generator=generator).tolist() for n in lengths]


def logits_difference(
    model: SplitModel,
    whole: PreTrainedModel,
    lengths: tuple[int, int] = LENGTHS,
    prompts: list[list[int]] | None = None,
) -> float:
    """Largest difference of logits for two sequences, in three batches that share chunks of both.

    A difference of logits that are larger than usual counts in their standard deviations.
    """
    whole = of_text(whole)
    ids = random_ids(lengths) if prompts is None else prompts
    a, b = map(len, ids)
    with torch.no_grad():
        want = [whole(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ids]
    attention, worst, first = Attention(model), 0.0, a // 3
    middle = [(0, p) for p in range(first, a - 1)] + [(1, p) for p in range(b - 1)]
    for batch in ([(0, p) for p in range(first)], middle, [(1, b - 1), (0, a - 1)]):
        got = step(model, attention, [(r, p, ids[r][p]) for r, p in batch], list(range(len(batch))))
        worst = max(worst, float((got - torch.stack([want[r][p] for r, p in batch])).abs().max()))
    return worst / max(1.0, float(want[0].std()))
