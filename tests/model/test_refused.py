"""Models that the split would run wrongly are refused by name, with the reason, before any weight is read."""

from __future__ import annotations

import sys

import pytest
import transformers

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.tiny import tiny

SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
REFUSED = {
    "git": ("Git", SMALL, "bypasses"),
    "gpt_neox_japanese": ("GPTNeoXJapanese", SMALL, "bypasses.*2 of 2 layers"),
    "rwkv": ("Rwkv", dict(hidden_size=64, num_hidden_layers=2, vocab_size=512), "cannot trace"),
    "llama4_text": (
        "Llama4Text",
        dict(SMALL, layer_types=["chunked_attention"] * 2, attention_chunk_size=None),
        "chunk",
    ),
    "t5": ("T5", dict(d_model=64, num_layers=2, num_heads=2), "encoder-decoder"),
    "qwen2_audio": ("Qwen2Audio", {}, "no causal language model"),
    "bert": ("Bert", dict(SMALL, intermediate_size=64), "both directions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_reason(name, tmp_path):
    kind, values, reason = REFUSED[name]
    getattr(transformers, f"{kind}Config")(**values).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"(?s)model type '{name}' is not supported: .*{reason}"):
        load_split(tmp_path, dtype="float32")


def test_a_package_that_transformers_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)  # whose tower of pictures is planned with it
    tiny("inkling_mm_model").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="with the package scipy, which is not installed: pip install scipy"):
        load_split(tmp_path, dtype="float32", weights=False)
