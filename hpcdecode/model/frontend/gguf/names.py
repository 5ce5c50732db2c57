"""What the tensors of a GGUF file are in the checkpoint of a model, by architecture.

Sources: the names of the package gguf (tensor_mapping.py), and what llama.cpp's converter changes in the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.header import GgufHeader


class Change(NamedTuple):
    """How a tensor of a GGUF file differs from that of the checkpoint. It is undone when the tensor is read.

    Attributes:
        heads: Heads whose rows were interleaved, halves of a head's rows by pairs; 0 if they were not.
        added: Number that was added to all elements.
        transposed: Whether it was transposed.
        row: Whether it was one row, of which the values are left.
        middle: Whether it had a dimension of 1 between its two.
    """

    heads: int = 0
    added: float = 0.0
    transposed: bool = False
    row: bool = False
    middle: bool = False


SAME = Change()
Changes = Callable[[str, Mapping[str, Any]], Change]


class NameTable(NamedTuple):
    """The names of an architecture's modules.

    Attributes:
        config: Its model type in transformers.
        top: Modules outside of layers, by their names in GGUF.
        layer: Modules of a layer, likewise.
        prefix: What the names of a layer's modules begin with, before its number.
        parameters: Keys of a layer's tensors that are no weight or bias of a module, by modules in GGUF.
        interleaved: Modules in GGUF, with a matrix for each expert, whose outputs in turn are those of one tensor of
            the checkpoint, by that tensor's key. Of their biases it has another, whose key ends in _bias.
        change: Returns what differs in the tensor of a name, given the metadata without the architecture's prefix.
    """

    config: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str = "model.layers"
    change: Changes = lambda name, values: SAME
    parameters: Mapping[str, str] = MappingProxyType({})
    interleaved: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class ExpertPart(NamedTuple):
    """What a tensor of a GGUF file is of a tensor of all experts of a layer.

    Attributes:
        key: Key of that tensor.
        part: Number of the part.
        parts: Names of the tensors of all parts.
    """

    key: str
    part: int
    parts: tuple[str, ...]


def interleaved(name: str, values: Mapping[str, Any]) -> Change:
    """Return the change of Llama: rows of queries and keys are in the order of GGML's rotary embedding."""
    heads = values.get("attention.head_count")
    if ".attn_q." in name:
        return Change(heads=heads or 0)
    return Change(heads=values.get("attention.head_count_kv", heads) or 0) if ".attn_k." in name else SAME


def plus_one(name: str, values: Mapping[str, Any]) -> Change:
    """Return the change of Gemma: norms have 1 added."""
    return Change(added=1.0) if name.endswith("norm.weight") else SAME


def transposed(name: str, values: Mapping[str, Any]) -> Change:
    """Return the change of GPT-2: projections are stored by output."""
    modules = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return Change(transposed=True) if name.endswith(tuple(f".{m}.weight" for m in modules)) else SAME


def gate_as_row(name: str, values: Mapping[str, Any]) -> Change:
    """Return the change of Qwen2-MoE: the gate of the shared expert is a vector."""
    return Change(row=True) if name.endswith(".ffn_gate_inp_shexp.weight") else SAME


def convolution(name: str, values: Mapping[str, Any]) -> Change:
    """Return the change of LFM2: the kernel of a convolution by channel has no dimension of input channels."""
    return Change(middle=True) if name.endswith(".shortconv.conv.weight") else SAME


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {f"attn_{own}": f"self_attn.{own[0]}_proj" for own in ("q", "k", "v", "output")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {f"attn_{own}_norm": f"self_attn.{own}_norm" for own in "qk"}
MLP = {f"ffn_{own}": f"mlp.{own}_proj" for own in ("gate", "up", "down")}
EXPERTS = {f"ffn_{own}_exps": f"mlp.experts.{{}}.{own}_proj" for own in ("gate", "up", "down")}
EXPERTS["ffn_gate_inp"] = "mlp.gate"
SHARED = {f"ffn_{own}_shexp": f"mlp.shared_expert.{own}_proj" for own in ("gate", "up", "down")}
SHARED["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
GEMMA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
MINIMAX_EXPERTS = {
    f"ffn_{own}_exps": f"block_sparse_moe.experts.{{}}.w{n}" for own, n in (("gate", 1), ("down", 2), ("up", 3))
}
MINIMAX_EXPERTS["ffn_gate_inp"] = "block_sparse_moe.gate"
GPT_OSS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
GPT_OSS_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
LFM2 = {
    **{f"attn_{own}": f"self_attn.{own}_proj" for own in "qkv"},
    "attn_output": "self_attn.out_proj",
    **{f"attn_{own}_norm": f"self_attn.{own}_layernorm" for own in "qk"},
    **{f"shortconv.{own}": f"conv.{own}" for own in ("conv", "in_proj", "out_proj")},
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"ffn_{own}": f"feed_forward.w{n}" for own, n in (("gate", 1), ("down", 2), ("up", 3))},
}
DENSE = ATTENTION | NORMS | MLP
PHI3 = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj"}
STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
TABLES = {
    "llama": NameTable("llama", TOP, DENSE, change=interleaved),
    "qwen2": NameTable("qwen2", TOP, DENSE),
    "qwen2moe": NameTable("qwen2_moe", TOP, ATTENTION | NORMS | EXPERTS | SHARED, change=gate_as_row),
    "qwen3": NameTable("qwen3", TOP, DENSE | HEAD_NORMS),
    "qwen3moe": NameTable("qwen3_moe", TOP, ATTENTION | NORMS | HEAD_NORMS | EXPERTS),
    "phi3": NameTable("phi3", TOP, NORMS | PHI3 | {"ffn_down": "mlp.down_proj"}),
    "gemma2": NameTable("gemma2", TOP, ATTENTION | MLP | GEMMA, change=plus_one),
    "gemma3": NameTable("gemma3_text", TOP, ATTENTION | MLP | GEMMA | HEAD_NORMS, change=plus_one),
    "gpt-oss": NameTable(
        "gpt_oss",
        TOP,
        ATTENTION | GPT_OSS,
        parameters={"attn_sinks": "self_attn.sinks"},
        interleaved=GPT_OSS_EXPERTS,
    ),
    "minimax-m2": NameTable(
        "minimax_m2",
        TOP,
        ATTENTION | NORMS | HEAD_NORMS | MINIMAX_EXPERTS,
        parameters={"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
    ),
    "lfm2": NameTable("lfm2", LFM2_TOP, LFM2, change=convolution),
    "starcoder2": NameTable("starcoder2", TOP, ATTENTION | NORMS | STARCODER2),
    "stablelm": NameTable("stablelm", TOP, DENSE),
    "gpt2": NameTable("gpt2", GPT2_TOP | {"output": "lm_head"}, GPT2_LAYER, "transformer.h", transposed),
}
IN_CONFIG = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")  # follow from the config
NAME = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+(?:\.\w+)?)\.(weight|bias)")


def table_of(header: GgufHeader) -> tuple[str, NameTable]:
    """Return the architecture of a model, and the names of its modules.

    Args:
        header: Header of its first file.

    Raises:
        UserError: If the architecture is not known.
    """
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in TABLES:
        raise UserError(
            f"{header.file}: expected a GGUF file of one of the architectures {', '.join(TABLES)}, got "
            f"{architecture!r:.100}; give the model's directory in Hugging Face format"
        )
    return architecture, TABLES[architecture]


def own_values(header: GgufHeader, architecture: str) -> dict[str, Any]:
    """Return the metadata of the architecture, without its prefix."""
    prefix = f"{architecture}."
    return {key.removeprefix(prefix): v for key, v in header.values.items() if key.startswith(prefix)}


def key_of(table: NameTable, name: str) -> str | None:
    """Return the checkpoint's key of a tensor, with {} for the number of an expert; None if it has none."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, leaf = match.groups()
    if layer is not None and module in table.parameters:
        return f"{table.prefix}.{int(layer)}.{table.parameters[module]}"
    found = table.top.get(module) if layer is None else table.layer.get(module)
    if found is None:
        return None
    return f"{found}.{leaf}" if layer is None else f"{table.prefix}.{int(layer)}.{found}.{leaf}"


def part_of(table: NameTable, name: str) -> ExpertPart | None:
    """Return what a tensor is of a tensor of all experts; None if it is of none."""
    match = NAME.fullmatch(name)
    if match is None or match[1] is None:
        return None
    layer, module, leaf = match.groups()
    for key, modules in table.interleaved.items():
        if module in modules:
            whole = f"{table.prefix}.{int(layer)}.{key}{'_bias' if leaf == 'bias' else ''}"
            return ExpertPart(whole, modules.index(module), tuple(f"blk.{layer}.{own}.{leaf}" for own in modules))
    return None
