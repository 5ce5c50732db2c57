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
            tensors[key] = (value / value.std()).round().clamp(-1, 1).mul(largest).add(0.0).contiguous()  # no -0
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


def parameters(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Recurrences: -exp of logarithms, time steps by another name, and kernels without input channels."""
    stem, _, leaf = key.rpartition(".")
    if leaf == "A_log":
        yield key, -value.exp()
    elif leaf == "dt_bias":
        yield f"{stem}.dt_proj.bias", value
    else:
        yield key, value.squeeze(1) if key.endswith("conv1d.weight") else value


def gated_delta(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Qwen3-Next: norms but those of heads of V have 1 added, and Q, K, V and gates of heads of K are sorted."""
    if key.endswith("norm.weight") and "linear_attn" not in key:
        yield key, value + 1
    elif key.endswith(".in_proj_qkvz.weight"):
        keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
        own = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        parts = [part.flatten(0, 1) for part in value.unflatten(0, (keys, -1)).split([width, width, own, own], 1)]
        layer = key.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
        yield f"blk.{layer}.attn_gate.weight", parts[3]
    else:
        yield from parameters(key, value, config)


def sorted_heads(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Qwen3.5: as Qwen3-Next, and the first heads of V of all heads of K come before their second."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = [k * (heads // keys) + i for i in range(heads // keys) for k in range(keys)]
    last = key.removesuffix(".weight").split(".")[-1]
    if last in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        value = value.unflatten(0, (heads, -1))[order].flatten(0, 1)
    elif last in ("in_proj_qkv", "conv1d"):
        rest = 2 * keys * config["linear_key_head_dim"]
        value = torch.cat([value[:rest], value[rest:].unflatten(0, (heads, -1))[order].flatten(0, 1)])
    elif last == "out_proj":
        value = value.unflatten(1, (heads, -1))[:, order].flatten(1, 2)
    yield from gated_delta(key, value, config)


def mamba2(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Mamba-2: a number a head has a dimension of 1, and norms are by group."""
    for part, made in parameters(key, value, config):
        if part.endswith((".A_log", ".D")):
            yield part, made[:, None]
        elif part.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            yield part, made.unflatten(0, (config.get("n_groups") or config["mamba_n_groups"], -1))
        else:
            yield part, made


def granite_hybrid(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Granite 4: without experts the shared one is named as others' layers."""
    if "mamba" in key:
        yield from mamba2(key, value, config)
    elif "shared_mlp" in key and not config["num_local_experts"]:
        names = ("gate", "up") if "input" in key else ("down",)
        for name, part in zip(names, value.chunk(len(names)), strict=True):
            yield f"blk.{key.split('.')[2]}.ffn_{name}.weight", part.contiguous()
    else:
        yield from granite(key, value, config)


def nemotron_h(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Nemotron-H: as Granite 4, and experts are named as others' are."""
    change = by_pairs if key.endswith(("q_proj.weight", "k_proj.weight")) else mamba2
    for part, made in change(key, value, config):
        yield part.replace("backbone.", "model.").replace(".mixer.", ".mlp.") if ".experts." in part else part, made


def falcon_h1(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Falcon-H1: multipliers are in the weights."""
    of_attention = {"q": 1.0, "k": config["key_multiplier"], "v": 1.0}
    factors = {
        **{f"{name}_proj": config["attention_in_multiplier"] * own for name, own in of_attention.items()},
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    name = key.split(".")[-2]
    if name == "in_proj":
        states, inner = config["mamba_n_groups"] * config["mamba_d_state"], config["mamba_d_ssm"]
        parts = value.split([inner, inner, states, states, config["mamba_n_heads"]])
        multipliers = config["ssm_multipliers"]
        joined = torch.cat([part * own for part, own in zip(parts, multipliers, strict=True)])
        yield key, joined * config["ssm_in_multiplier"]
    elif name == "pre_ff_layernorm":
        yield f"blk.{key.split('.')[2]}.ffn_norm", value
    else:
        yield from mamba2(key, value * factors.get(name, 1.0), config)


def gemma4(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Gemma 4: parameters without a module have names of weights or scales."""
    layer, leaf = key.split(".")[2], key.split(".")[-1]
    names = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
    if leaf in names:
        yield f"blk.{layer}.{names[leaf]}", value
    elif leaf in ("layer_scalar", "gate_up_proj", "down_proj"):
        yield f"{key}.weight", value
    else:
        yield key, value


def llama4(key: str, value: torch.Tensor, config: dict) -> Converted:
    """Llama 4: experts' matrices are [out, in], and their gates tensors of their own."""
    if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield key, value
        return
    names = ("gate_proj", "up_proj") if "gate" in key else ("down_proj",)
    for name, part in zip(names, value.mT.chunk(len(names), 1), strict=True):
        yield f"{key.rpartition('.')[0]}.{name}.weight", part.contiguous()


CONVERTERS: dict[str, Converter] = {
    "deepseek2": latent,
    **dict.fromkeys(("smollm3", "granite", "mistral3"), by_pairs),
    "gemma4": gemma4,
    "llama4": llama4,
    "granitemoe": granite,
    "qwen3next": gated_delta,
    **dict.fromkeys(("qwen35", "qwen35moe"), sorted_heads),
    "granitehybrid": granite_hybrid,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), nemotron_h),
    "mamba2": mamba2,
    "falcon-h1": falcon_h1,
}


def convert(
    source: Path,
    architecture: str,
    kinds: Kinds,
    change: Converter | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    **values: object,
) -> Path:
    """Write a checkpoint of `save_ternary` as a GGUF file beside it.

    Args:
        source: The checkpoint.
        architecture: Its name in GGUF.
        kinds: Returns the block type of a matrix, by its name in GGUF.
        change: What the converter does with a tensor, if not that of CONVERTERS.
        extra: Further tensors in float32, by name.
        values: Metadata beside the usual, without the architecture, or of the tokenizer; None for what is not stated.
    """
    config, change = json.loads((source / "config.json").read_text()), change or CONVERTERS.get(architecture, as_it_is)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    names = gguf.get_tensor_name_map(arch, max(layers, values.get("block_count") or 0))
    made: dict[str, list[np.ndarray]] = {}
    given = load_file(source / "model.safetensors")
    for key in sorted(given, key=lambda key: [int(p) if p.isdigit() else 0 for p in key.split(".")]):
        for part, value in change(key, given[key], config):
            part = part.replace("e_score_correction_bias", "e_score_correction.bias")
            name = names.get_name(EXPERT.sub(".experts.", part), try_suffixes=(".weight", ".bias")) or part
            assert name.startswith(("blk.", "output", "token_embd", "per_layer")), part
            made.setdefault(name, []).append(value.numpy())
    file, rng = source / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    describe(writer, config, architecture, source, values)
    made |= {name: [value.numpy()] for name, value in (extra or {}).items()}
    for name, matrices in made.items():
        value = np.stack(matrices) if len(matrices) > 1 else matrices[0]
        plain = value.ndim < 2 or value.shape[-1] % 32 or not name.endswith(".weight") or "ffn_gate_inp." in name
        plain = plain or "ssm_norm" in name
        kind = KINDS["F32" if plain else kinds(name)]
        writer.add_tensor(name, stored(np.ascontiguousarray(value), kind, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
