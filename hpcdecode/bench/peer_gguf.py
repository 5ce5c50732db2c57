"""Write a Llama checkpoint as the file that llama.cpp loads.

    PYTHON peer_gguf.py MODEL_DIR OUT.gguf BF16|Q8_0|Q4_K_M

A script for that peer's own interpreter: it imports nothing of hpcdecode. Matrices get the given type, norms float32.
There is no vocabulary, as rows are token ids. Q4_K_M is a mix of types that llama.cpp makes of a file in BF16.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf
    import numpy
    from numpy.typing import NDArray

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MIXES = {"Q4_K_M": 15}  # by the name that llama.cpp gives it; LLAMA_FTYPE_MOSTLY_Q4_K_M of llama.h
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main(model: str, out: str, kind: str) -> None:
    """Convert the checkpoint in `model` to `out`, matrices in the type `kind`."""
    sys.path.pop(0)  # this script's folder: its files are not to be taken for others' modules
    if kind in MIXES:
        whole = f"{out}.bf16"
        write(model, whole, "BF16")
        mix(whole, out, MIXES[kind])
        os.remove(whole)
    else:
        write(model, out, kind)


def mix(whole: str, out: str, kind: int) -> None:
    """Let llama.cpp write the file `whole` as `out`, in the mix of types of the number `kind`."""
    import llama_cpp  # type: ignore[import-not-found]  # in the peer's own environment

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = kind, len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(whole.encode(), out.encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp could not write {out}")


def write(model: str, out: str, kind: str) -> None:
    """Write the checkpoint in `model` to `out`, matrices in the type `kind`."""
    import gguf

    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(out, "llama")
    describe(writer, config)
    paths = sorted(name for name in os.listdir(model) if name.endswith(".safetensors"))
    for name, values in (each for path in paths for each in tensors(os.path.join(model, path))):
        for projection, count in heads.items():
            if projection in name:
                values = interleaved(values, count)
        matrix = gguf.GGMLQuantizationType[kind] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(renamed(name), gguf.quants.quantize(values, matrix), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of config.json."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def tensors(path: str) -> Iterator[tuple[str, NDArray[numpy.float32]]]:
    """Yield (name, float32 array) of a safetensors file of bfloat16."""
    import numpy

    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r", offset=8 + size)
    for name, entry in entries.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            halves = data[first:end].view(numpy.uint16).astype(numpy.uint32) << 16
            yield name, halves.view(numpy.float32).reshape(entry["shape"])


def interleaved(weight: NDArray[numpy.float32], heads: int) -> NDArray[numpy.float32]:
    """Return a weight with rotary pairs as llama.cpp has them: neighbours in a head, in place of halves of it."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    neighbours: NDArray[numpy.float32] = halves.swapaxes(1, 2).reshape(weight.shape)
    return neighbours


def renamed(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_LAYER[part]}.weight"


if __name__ == "__main__":
    main(*sys.argv[1:])
