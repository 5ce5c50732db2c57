"""Checkpoints with a layer for multi-token prediction, and that layer as transformers runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.mtp import with_mtp_layer
from tests.support.models import model_class

APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def add_mtp(path: Path, seed: int = 0) -> MtpModel:
    """Add a random layer for multi-token prediction to a checkpoint, as its family has it; return the layer.

    Qwen has it apart (`mtp.`), DeepSeek and GLM behind the layers of the model.
    """
    config = with_mtp_layer(read_config(path))
    main = model_class(config).from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
    layer = MtpModel(main, 1).eval()
    block = layer.layers[0].mtp_block
    forward = block.forward
    block.forward = lambda *args, **kwargs: _first(forward(*args, **kwargs))  # that of GLM-5 returns more
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in layer.layers.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.ndim > 1 else weight + 0.1 * noise)
    layers, apart = config.num_hidden_layers, "qwen" in config.model_type
    own: dict[str, Tensor] = {}
    for name, tensor in layer.layers.state_dict().items():
        for key, part in _unstacked(name.removeprefix("0."), tensor):
            own[_key(key, apart, layers)] = part.contiguous()
    file = path / "model.safetensors"
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    return layer


def _first(made: Tensor | tuple[Tensor, ...]) -> Tensor:
    return made[0] if isinstance(made, tuple) else made


def _key(name: str, apart: bool, layers: int) -> str:
    module, _, rest = name.partition(".")
    if not apart:
        return f"model.layers.{layers}." + name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"mtp.layers.0.{rest}" if module == "mtp_block" else f"mtp.{APART[module]}.{rest}"


def _unstacked(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return what a checkpoint has of a tensor: weights of experts one by one."""
    stem, _, leaf = name.rpartition(".")
    if not stem.endswith("experts") or leaf not in ("gate_up_proj", "down_proj"):
        return [(name, tensor)]
    if leaf == "down_proj":
        return [(f"{stem}.{e}.down_proj.weight", own) for e, own in enumerate(tensor)]
    halves = (zip(("gate_proj", "up_proj"), own.chunk(2), strict=True) for own in tensor)
    return [(f"{stem}.{e}.{half}.weight", part) for e, parts in enumerate(halves) for half, part in parts]


@torch.no_grad()
def predicted(layer: MtpModel, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [T, vocab] of the layer and what its head takes [T, hidden], by transformers.

    Args:
        layer: The layer.
        ids: Token ids, int64 [T].
        hidden: What the model's head takes of the tokens before these, [T, hidden].
    """
    made = layer.forward_layer(0, hidden[None], torch.arange(len(ids))[None], None, input_ids=ids[None])
    return layer._project_to_logits(made)[0], made[0]
