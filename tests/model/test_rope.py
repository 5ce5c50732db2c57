"""Rotary frequencies depend on the model alone: longrope's factors by the longest sequence it runs, dynamic NTK's."""

from __future__ import annotations

import json

import pytest

from hpcdecode.model import load_split
from hpcdecode.model.frontend.config import read_config
from tests.support.models import LATENT, SHAPE, _make
from tests.support.whole_models import LENGTHS, logits_difference, read_whole, save_whole

LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
)
POSITIONS = SHAPE["max_position_embeddings"]


def phi3(original: int):
    rope = {**LONG, "original_max_position_embeddings": original}
    return _make("Phi3", **SHAPE, rope_parameters=rope, original_max_position_embeddings=original)()


def test_longrope_has_long_factors_if_the_context_is_longer_than_the_original(tmp_path):
    """Transformers switches by the longest row of a batch; rows longer than the original context are as there."""
    whole = save_whole(phi3(16), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


def test_rows_shorter_than_the_original_context_have_long_factors_too(tmp_path):
    """As in vLLM: the same checkpoint, whose short factors are the long ones, in transformers."""
    whole, model = save_whole(phi3(512), tmp_path), load_split(tmp_path, dtype="float32")
    assert logits_difference(model, whole) > 1e-2  # where transformers takes the short factors
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    file.write_text(json.dumps(config))
    assert logits_difference(model, read_whole(type(whole), tmp_path)) < 1e-4


def test_longrope_has_short_factors_if_the_context_is_the_original(tmp_path):
    whole = save_whole(phi3(POSITIONS), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


def test_dynamic_ntk_does_not_change_up_to_the_context(tmp_path):
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    shape = {**SHAPE, "max_position_embeddings": max(LENGTHS)}
    whole = save_whole(_make("Llama", **shape, rope_parameters=rope)(), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


@pytest.fixture
def kimi_k2(tmp_path):
    """A DeepSeek-V3 whose config.json has a model type that transformers does not know."""
    config = _make("DeepseekV3", **LATENT, n_group=1, topk_group=1)()
    whole = save_whole(config, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "kimi_k2"}))
    return tmp_path, whole


def test_an_unknown_model_type_is_that_of_its_architecture(kimi_k2):
    folder, whole = kimi_k2
    assert read_config(folder).model_type == "deepseek_v3"
    assert logits_difference(load_split(folder, dtype="float32"), whole) < 1e-4
