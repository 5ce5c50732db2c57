"""Write small GGUF files of architectures whose weights the converter splits, joins or sorts, from their checkpoints.

Their matrices are -1, 0 and 1 times one number. In that Q8_0 holds them exactly, in any order of rows and columns, so
that the checkpoint itself says what the file is to give.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from tests.support.gguf_files import EXPERT, KINDS, Kinds, describe, halves, stored
from tests.support.models import save

LARGEST = {"lm_head": 127 / 1024, "embed_tokens": 127 / 512}  # of matrices, others: that of lm_head
Converted = Iterator[tuple[str, torch.Tensor]]
Converter = Callable[[str, torch.Tensor, dict], Converted]


def save_ternary(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a random checkpoint with such matrices."""
    file = save(config, folder) / "model.safetensors"
    tensors = load_file(file)
    for key, value in tensors.items():
        if value.ndim > 1 and value.is_floating_point():
            largest = LARGEST["embed_tokens" if "embed_tokens" in key else "lm_head"]
            tensors[key] = (value / value.std()).round().clamp(-1, 1).mul(largest).contiguous()
    save_file(tensors, file, {"format": "pt"})
    return folder


def as_it_is(key: str, value: torch.Tensor, config: dict) -> Converted:
    yield key, value


def latent(key: str, value: torch.Tensor, config: dict) -> Converted:
    """DeepSeek: of the projection of the latent those of K, transposed by head, and those of V."""
    if not key.endswith(".kv_b_proj.weight"):
        yield key, value
        return
    heads = value.view(config["num_attention_heads"], -1, value.shape[1])
    keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
    yield key.replace("kv_b", "k_b"), keys.mT.contiguous()
    yield key.replace("kv_b", "v_b"), values.contiguous()


def by_pairs(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Llama: rows of queries and keys in the order of GGML's rotary embedding."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(key.split(".")[-2])
    yield key, value if heads is None else torch.from_numpy(halves(value.numpy(), config[heads]))


def granite(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Granite: as Llama, and gates of experts are tensors of their own."""
    if not key.endswith(".input_linear.weight"):
        yield from by_pairs(key, value, config)
        return
    layer, shared = key.split(".")[2], "shared" in key
    for name, part in zip(("gate", "up"), value.chunk(2, -2), strict=True):
        yield f"blk.{layer}.ffn_{name}_{'shexp' if shared else 'exps'}.weight", part.contiguous()


CONVERTERS: dict[str, Converter] = {
    "deepseek2": latent,
    **dict.fromkeys(("smollm3", "granite"), by_pairs),
    "granitemoe": granite,
}


def convert(source: Path, architecture: str, kinds: Kinds, change: Converter | None = None, **values: object) -> Path:
    """Write a checkpoint of `save_ternary` as a GGUF file beside it.

    Args:
        source: The checkpoint.
        architecture: Its name in GGUF.
        kinds: Returns the block type of a matrix, by its name in GGUF.
        change: What the converter does with a tensor, if not that of CONVERTERS.
        values: Metadata beside the usual, without the architecture; None for what is not stated.
    """
    config, change = json.loads((source / "config.json").read_text()), change or CONVERTERS.get(architecture, as_it_is)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    made: dict[str, list[np.ndarray]] = {}
    given = load_file(source / "model.safetensors")
    for key in sorted(given, key=lambda key: [int(p) if p.isdigit() else 0 for p in key.split(".")]):
        for part, value in change(key, given[key], config):
            part = part.replace("e_score_correction_bias", "e_score_correction.bias")
            name = names.get_name(EXPERT.sub(".experts.", part), try_suffixes=(".weight", ".bias")) or part
            assert name.startswith(("blk.", "output", "token_embd")), part
            made.setdefault(name, []).append(value.numpy())
    file, rng = source / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    describe(writer, config, architecture, source, values)
    for name, matrices in made.items():
        value = np.stack(matrices) if len(matrices) > 1 else matrices[0]
        plain = value.ndim < 2 or value.shape[-1] % 32 or not name.endswith(".weight") or "ffn_gate_inp" in name
        kind = KINDS["F32" if plain else kinds(name)]
        writer.add_tensor(name, stored(np.ascontiguousarray(value), kind, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
