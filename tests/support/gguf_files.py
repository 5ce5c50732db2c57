"""Write small GGUF files of a checkpoint as llama.cpp's converter does, and the checkpoint that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support.models import SHAPE

EXPERT = re.compile(r"\.experts\.\d+\.")
PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
TURNED = re.compile(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
POOL = 4096
GPT_OSS = dict(**SHAPE, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
GPT_OSS["tie_word_embeddings"] = False
GPT_OSS_VALUES = {  # metadata of that config
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": SHAPE["intermediate_size"],
    "attention.sliding_window": 4,
}
KINDS = gguf.GGMLQuantizationType
Kinds = Callable[[str], str]
Extra = dict[str, torch.Tensor] | None


class Written(NamedTuple):
    """A GGUF file, or the first part of it, and the checkpoint of the weights that it holds."""

    file: Path
    plain: Path


def halves(weight: np.ndarray, heads: int, back: bool = False) -> np.ndarray:
    """Rows in the order of GGML's rotary embedding, or back in that of transformers."""
    size = len(weight) // heads // 2
    parts = (size, 2) if back else (2, size)
    return weight.reshape(heads, *parts, -1).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random bytes that are plausible weights in blocks of a type, [rows, bytes]."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(256, size=(POOL, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = np.abs(gguf.quants.dequantize(blocks, kind).reshape(POOL, elements))
    good = blocks[np.isfinite(values).all(1) & (values.max(1) < 1) & (values.max(1) > 1e-3)]
    assert len(good) > 3, kind
    count = int(np.prod(shape)) // elements
    return good[rng.integers(len(good), size=count)].reshape(*shape[:-1], -1)


def stored(value: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """What the file holds of a weight; of types that nothing here can quantise to, random blocks."""
    if kind.name in ("F32", "F16"):
        return value.astype({"F32": np.float32, "F16": np.float16}[kind.name])
    try:
        return gguf.quants.quantize(value, kind)
    except NotImplementedError:
        return random_blocks(kind, value.shape, rng)


def as_converted(given: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint as llama.cpp's converter names, splits and shapes them before it looks up names."""
    made = {}
    for key, value in given.items():
        stem, _, leaf = key.rpartition(".")
        if architecture == "gpt-oss" and ".experts." in key:
            leaf, bias = leaf.removesuffix("_bias"), leaf.endswith("_bias")
            outputs = value if bias else value.mT
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for i, name in enumerate(names):
                made[f"{stem}.{name}.{'bias' if bias else 'weight'}"] = outputs[:, i :: len(names)].contiguous()
        elif leaf == "sinks":
            made[f"{key}.weight"] = value
        elif leaf == "e_score_correction_bias":
            made[f"{stem}.e_score_correction.bias"] = value
        else:
            made[key] = value.squeeze(1) if key.endswith("conv.conv.weight") else value
    return made


def as_given(found: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """The opposite."""
    made = {}
    for key, value in found.items():
        stem, _, leaf = key.rpartition(".")
        if architecture == "gpt-oss" and ".experts." in key:
            layer, name = stem.rsplit(".", 1)
            if name == "gate_proj":
                value = torch.stack([value, found[f"{layer}.up_proj.{leaf}"]], 2).flatten(1, 2)
            if name != "up_proj":
                whole = f"{layer}.{'gate_up_proj' if name == 'gate_proj' else name}"
                made[whole if leaf == "weight" else f"{whole}_bias"] = value.mT if leaf == "weight" else value
        elif stem.endswith("sinks"):
            made[stem] = value
        elif stem.endswith("e_score_correction"):
            made[f"{stem}_bias"] = value
        else:
            made[key] = value[:, None] if key.endswith("conv.conv.weight") else value
    return {key: value.contiguous() for key, value in made.items()}


def write(
    source: Path, folder: Path, architecture: str, kinds: Kinds, parts: int = 1, extra: Extra = None, **values: object
) -> Written:
    """Write the checkpoint in `source`.

    Args:
        source: The checkpoint.
        folder: Where to make the two.
        architecture: Its name in GGUF.
        kinds: Returns the block type of a matrix, by its name in GGUF.
        parts: Number of files.
        extra: Further tensors in float32, by name.
        values: Metadata beside the usual, without the architecture, or of the tokenizer.
    """
    config, rng = json.loads((source / "config.json").read_text()), np.random.default_rng(0)
    plain = Path(shutil.copytree(source, folder / "plain", dirs_exist_ok=True))
    given = as_converted(load_file(source / "model.safetensors"), architecture)
    found = dict[str, torch.Tensor]()
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers") or config["n_layer"])
    tensors: dict[str, list[str]] = {}
    for key in sorted(given, key=lambda key: [int(p) if p.isdigit() else 0 for p in key.split(".")]):
        name = names.get_name(EXPERT.sub(".experts.", key), try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        tensors.setdefault(name, []).append(key)
    heads = {"q": config.get("num_attention_heads"), "k": config.get("num_key_value_heads")}
    made = {}
    for name, keys in tensors.items():
        matrices = [given[key].numpy() for key in keys]
        value = np.stack(matrices) if len(keys) > 1 else matrices[0]
        permuted = PERMUTED.fullmatch(name) if architecture == "llama" else None
        added = architecture.startswith("gemma") and name.endswith("norm.weight")
        turned = architecture == "gpt2" and TURNED.fullmatch(name)
        row = name.endswith("ffn_gate_inp_shexp.weight")
        value = halves(value, heads[permuted[1]]) if permuted else value + 1 if added else value
        value = np.ascontiguousarray(value.T if turned else value[0] if row else value)
        whole = value.ndim == 1 or name.endswith(("shortconv.conv.weight", ".bias"))
        kind = KINDS["F32" if whole else kinds(name)]
        made[name] = (stored(value, kind, rng), kind)
        value = gguf.quants.dequantize(*made[name]).reshape(value.shape).astype(np.float32)
        value = halves(value, heads[permuted[1]], back=True) if permuted else value - 1 if added else value
        value = value.T if turned else value[None] if row else value
        for i, key in enumerate(keys):
            found[key] = torch.from_numpy(np.ascontiguousarray(value[i] if len(keys) > 1 else value)).clone()
    made |= {name: (value.float().numpy(), KINDS.F32) for name, value in (extra or {}).items()}
    save_file(as_given(found, architecture), plain / "model.safetensors", {"format": "pt"})
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.gguf" if parts > 1 else "model.gguf"
        writer = gguf.GGUFWriter(folder / name, architecture)
        if part == 0:
            describe(writer, config, architecture, source, values)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(made))
        for own in list(made)[part::parts]:
            writer.add_tensor(own, made[own][0], raw_dtype=made[own][1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = f"model-00001-of-{parts:05}.gguf" if parts > 1 else "model.gguf"
    return Written(folder / first, plain)


def describe(writer: gguf.GGUFWriter, config: dict, architecture: str, source: Path, values: dict) -> None:
    """Write the metadata: sizes of the model, and its tokenizer."""
    writer.add_name("tiny")
    for key, value in {**usual(config, architecture), **values}.items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    tokenizer = json.loads(AutoTokenizer.from_pretrained(source).backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def usual(config: dict, architecture: str) -> dict[str, object]:
    """The metadata of most architectures: sizes of the model."""
    hidden = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    found = {
        "context_length": config.get("max_position_embeddings") or config.get("n_positions"),
        "block_count": config.get("num_hidden_layers") or config.get("n_layer"),
        "embedding_length": hidden,
        "feed_forward_length": config.get("intermediate_size") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
    }
    if "rms_norm_eps" in config or architecture == "lfm2":
        found["attention.layer_norm_rms_epsilon"] = config.get("rms_norm_eps") or config["norm_eps"]
    else:
        eps = next(v for k, v in config.items() if k.endswith(("epsilon", "norm_eps")))
        found["attention.layer_norm_epsilon"] = eps
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta"):
        partial = rope.get("partial_rotary_factor") or 1.0
        found["rope.freq_base"] = float(rope["rope_theta"])
        found["rope.dimension_count"] = int((config.get("head_dim") or hidden // heads) * partial)
    if config.get("head_dim"):
        found["attention.key_length"] = found["attention.value_length"] = config["head_dim"]
    return found
