"""Model types that need something that no architecture of the other tests needs: logits equal those of transformers."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file, save_file

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

QUICK = ("phimoe", "glm5_next", "minimax")  # a constant made on a device; pools beside states; lightning attention
FULL = ("hy_v4", "mistral_large4", "axk2", "dots3_note_text", "qwen4_exp_text")  # indexers, in models of other families
FULL += ("mistral4", "bailing_hybrid", "zamba2", "cohere_compass_text", "gemma4", "step3p7")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in FULL)])
def test_logits_equal_those_of_transformers(name, tmp_path):
    whole = save_whole(tiny(name), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


def test_blocks_of_lightning_attention(tmp_path):
    """transformers attends in blocks of 32 tokens here."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    whole = save_whole(tiny("minimax", block_size=32, layer_types=kinds), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


def without(folder, pattern):
    """Take tensors from a checkpoint; return whether there were any."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kept = {key: tensor for key, tensor in tensors.items() if not re.search(pattern, key)}
    save_file(kept, file, {"format": "pt"})
    return len(kept) < len(tensors)


@pytest.mark.parametrize("released", [False, True])
def test_experts_that_return_their_input(released, tmp_path):
    """transformers writes weights for these, which nothing uses. Released checkpoints need not have them."""
    whole = save_whole(tiny("longcat_flash"), tmp_path)
    assert not released or without(tmp_path, r"experts\.(8|9|10|11)\.")
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"layers\.1\.mlp\.experts\.3\.", "layers.1.mlp.experts.down_proj: .* none of expert 3"),
        (r"layers\.1\.mlp\.experts\.3\.up_proj", "layers.1.mlp.experts.gate_up_proj: .* none of expert 3"),
        (r"experts\.7\.", "experts 0 to 7, got none of expert 7"),
    ],
)
def test_a_lost_expert_is_named(pattern, says, tmp_path):
    """Those behind it must not be taken for others."""
    save_whole(tiny("qwen3_moe"), tmp_path)
    assert without(tmp_path, pattern)
    with pytest.raises(UserError, match=says):
        load_split(tmp_path, dtype="float32")
