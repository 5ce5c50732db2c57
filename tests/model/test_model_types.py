"""Model types that need something that no architecture of the other tests needs: logits equal those of transformers."""

from __future__ import annotations

import pytest

from hpcdecode.model import load_split
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

QUICK = ("phimoe", "glm5_next", "minimax")  # a constant made on a device; pools beside states; lightning attention
FULL = ("hy_v4", "mistral_large4", "axk2", "dots3_note_text", "qwen4_exp_text")  # indexers, in models of other families
FULL += ("mistral4", "bailing_hybrid", "zamba2", "cohere_compass_text", "gemma4")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in FULL)])
def test_logits_equal_those_of_transformers(name, tmp_path):
    whole = save_whole(tiny(name), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


def test_blocks_of_lightning_attention(tmp_path):
    """transformers attends in blocks of 32 tokens here."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    whole = save_whole(tiny("minimax", block_size=32, layer_types=kinds), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4
