"""Checkpoints of benchmarks whose layers keep recurrent states or attend over latents, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpcdecode.attention.shapes import MixerShape, state_bytes
from hpcdecode.bench.mixed_configs import COMMON, MIXED, WITH_EXPERTS, MixedModel
from hpcdecode.bench.workload import Shape, made, write_tokenizer
from hpcdecode.planning.layer_work import attend_flop, kv_bytes
from hpcdecode.planning.model_size import ModelSize


@dataclass(frozen=True)
class MixedShape(Shape):
    """Sizes of a model of MIXED, whose layers are not all alike.

    Attributes:
        matrices: (inputs, outputs) of the projections of all layers.
        weights: Bytes of all weights.
        kept: What a sequence keeps at each layer.
    """

    matrices: tuple[tuple[int, int], ...] = ()
    weights: int = 0
    kept: tuple[MixerShape, ...] = ()

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the projections of all layers."""
        return list(self.matrices)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the whole model."""
        return self.weights

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V, or of the latents, of one token, all layers, bfloat16."""
        return int(kv_bytes(self.kept, "bfloat16"))

    @property
    def pair_flop(self) -> int:
        """Return the FLOP of a query and a key, all heads and layers, in the form that decode attention has."""
        return int(attend_flop(self.kept))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's states, float32."""
        return state_bytes(self.kept)


def products_of(name: str) -> MixedShape:
    """Return the shape of a name in MIXED, without what sequences keep."""
    import torch

    with torch.device("meta"):
        model = _made(MIXED[name])
    named = dict(model.named_parameters())
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = tuple((p.shape[1], p.shape[0]) for p in named.values() if p.dim() == 2 and id(p) not in outer)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    weights = sum(2 * p.numel() for p in named.values())
    return MixedShape(hidden, 1, 1, 1, 0, vocabulary, matrices=matrices, weights=weights)


def touched_bytes(name: str, rows: int) -> float:
    """Return the bytes of the weights, in bfloat16, that a decode step of some rows reads, if choices are independent.

    Of an embedding it reads but a row for each.
    """
    import torch

    with torch.device("meta"):
        model = _made({**MIXED, **WITH_EXPERTS}[name])
    chosen = getattr(model.config, "num_experts_per_tok", 0)
    embedding, total = model.get_input_embeddings().weight, 0.0
    for weight in (p for p in model.parameters() if p is not embedding):
        stacked = weight.dim() == 3 and weight.shape[1] > 1
        share = 1 - (1 - chosen / len(weight)) ** rows if stacked else 1.0
        total += 2 * weight.numel() * share
    return total


@cache
def mixed_shape(name: str, directory: Path) -> MixedShape:
    """Return the shape of MIXED[name], whose checkpoint is in `directory`."""
    return replace(products_of(name), kept=tuple(ModelSize.from_directory(str(directory)).shapes))


def mixed_checkpoint(work: Path, name: str) -> Path:
    """Return the directory of a model of MIXED or WITH_EXPERTS under `work`; make it once.

    Its weights are random, in bfloat16, and it has a tokenizer.
    """
    return made(work / f"mixed-{name}", lambda folder: _write(folder, {**MIXED, **WITH_EXPERTS}[name]))


def _made(mixed: MixedModel) -> Any:
    import torch
    import transformers

    config = getattr(transformers, mixed.config)(**{**COMMON, **mixed.sizes})
    make: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32)


def _write(folder: Path, mixed: MixedModel) -> None:
    """Write a checkpoint whose matrices are random at 1/sqrt(inputs), so that most next tokens are no near ties."""
    import torch

    torch.manual_seed(0)
    model = _made(mixed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_()
            elif hasattr(module, "act_fn") or hasattr(module, "top_k"):  # experts, and what chooses them
                for weight in (p for p in module.parameters(recurse=False) if p.dim() > 1):
                    weight.normal_(std=weight.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
