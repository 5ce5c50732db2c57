"""The models of the end-to-end benchmark: its own checkpoints, directories and GGUF files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors import safe_open

from hpcdecode.bench import limits as limits_module
from hpcdecode.bench import peer_gguf
from hpcdecode.bench.contenders import Peer, Site
from hpcdecode.bench.limits import PREFILL_TOKENS
from hpcdecode.bench.own_models import OwnShape, shape_of
from hpcdecode.bench.workload import (
    SHAPES,
    WORKLOADS,
    checkpoint,
    label,
    llama_shape,
    made,
    prompt_file,
)
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import UserError
from tests.support.gguf_files import GPT_OSS, GPT_OSS_VALUES
from tests.support.gguf_files import write as write_gguf
from tests.support.models import save

TINY = SHAPES["tiny"]


@pytest.fixture
def checkpoint_of_experts(request):
    return request.getfixturevalue("checkpoint")("mixtral")


def test_the_checkpoint_has_the_bytes_that_the_shape_says(work):
    with safe_open(checkpoint(work, "tiny") / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert sum(t.nbytes for t in tensors) == TINY.weight_bytes
    config = json.loads((checkpoint(work, "tiny") / "config.json").read_text())
    kv_heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    assert TINY.kv_bytes == 2 * 2 * layers * kv_heads * config["head_dim"]


def test_every_id_of_the_vocabulary_has_a_text(work):
    tokenizer = Tokenizer.load(checkpoint(work, "tiny"))
    assert tokenizer.vocab_size == TINY.vocabulary
    assert all(tokenizer.decode([i]) for i in range(4, TINY.vocabulary))
    assert tokenizer.decode(tokenizer.encode_texts(["a plain text\n"])[0]) == "a plain text\n"


def test_a_checkpoint_that_was_not_finished_is_made_again(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        made(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []
    made(tmp_path / "model", lambda folder: (folder / "part").write_text("all"))
    made(tmp_path / "model", fail)  # complete: not touched
    assert (tmp_path / "model" / "part").read_text() == "all"


def test_a_directory_of_a_llama_is_a_model_too(work, tmp_path):
    own = checkpoint(work, "tiny")
    assert shape_of(str(own)) == TINY == shape_of("tiny")
    assert checkpoint(tmp_path, str(own)) == own and not list(tmp_path.iterdir())
    assert label("tiny") == "tiny" and label(str(own)).startswith("llama-tiny-") and label(f"{own}/") == label(str(own))
    rows = prompt_file(tmp_path, WORKLOADS["w1"], str(own), WORKLOADS["w1"].prompts(TINY)).read_text().splitlines()
    assert [json.loads(row)["prompt_token_ids"] for row in rows] == WORKLOADS["w1"].prompts(TINY)
    config = json.loads((own / "config.json").read_text())
    tied = tmp_path / "tied"
    tied.mkdir()
    (tied / "model.safetensors").touch()
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "head_dim": None}))
    assert shape_of(str(tied)) == replace(TINY, tied=True)
    assert TINY.weight_bytes - replace(TINY, tied=True).weight_bytes == 2 * TINY.vocabulary * TINY.hidden


@pytest.mark.parametrize("change", [{"model_type": "gemma3_text"}, {"head_dim": 96}])
def test_other_models_are_no_llamas(work, tmp_path, change):
    config = json.loads((checkpoint(work, "tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert llama_shape(tmp_path) is None


@pytest.mark.parametrize("written", [None, "{", "[]", '{"model_type": "llama"}'])
def test_directories_without_a_model_are_refused(tmp_path, written):
    if written is not None:
        (tmp_path / "config.json").write_text(written)
        with pytest.raises(UserError, match="a model directory with safetensors files, or a GGUF"):
            shape_of(str(tmp_path))
        (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(UserError, match=r"expected one of 8b, .*, 355m, .*, a model directory|expected the config"):
        shape_of(str(tmp_path))


def test_a_gguf_file_is_for_those_that_take_it(tmp_path):
    config = transformers.GptOssConfig(**GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    source = save(config, tmp_path / "source")
    written = write_gguf(source, tmp_path, "gpt-oss", lambda own: "Q8_0", **GPT_OSS_VALUES).file
    assert isinstance(shape_of(str(written)), OwnShape) and label(str(written)).startswith(f"{written.name}-")
    site = Site(tmp_path, str(written))
    assert Peer(site, "llama.cpp", sys.executable)._model() == written == Peer(site, "LLM", sys.executable)._model()
    with pytest.raises(UserError, match=r"--peer vllm: expected a model directory for it, got .*gguf"):
        Peer(site, "vllm", sys.executable)._model()


@pytest.mark.full
def test_the_ideal_of_experts_is_by_the_weights_that_tokens_touch(checkpoint_of_experts):
    shape = shape_of(str(checkpoint_of_experts))
    assert isinstance(shape, OwnShape) and shape.vocabulary == 512
    active = shape.size.layer_weights - (1 - 2 / 4) * shape.size.expert_weights
    assert shape.layer_weights == int(active)
    assert shape.body_seconds(1000, 1e9, 1e12) == pytest.approx(2 * 1000 * int(active) / 1e9)
    touched = 1 - (1 - 2 / 4) ** 3
    read = 2 * (shape.size.layer_weights - (1 - touched) * shape.size.expert_weights)
    assert shape.body_seconds(3, 1e15, 1e9) == pytest.approx(read / 1e9)
    assert shape.head_seconds(1, 1e15, 1e9) == pytest.approx(2 * shape.size.head_weights / 1e9)
    found = limits_module.measure(shape, [3, PREFILL_TOKENS])
    assert 0 < found.body[3] < found.body[PREFILL_TOKENS] and set(found.head) == {3, PREFILL_TOKENS}


def test_the_tensors_of_a_checkpoint_have_names_and_order_of_llama_cpp(work):
    path = checkpoint(work, "tiny") / "model.safetensors"
    found = dict(peer_gguf.tensors(str(path)))
    with safe_open(path, "pt") as file:
        assert set(found) == set(file.keys())
        assert all((found[name] == file.get_tensor(name).float().numpy()).all() for name in found)
    names = {peer_gguf.renamed(name) for name in found}
    assert len(names) == len(found) and {"token_embd.weight", "output.weight", "blk.1.attn_k.weight"} <= names
    rows = np.arange(8.0)[:, None] * np.ones((1, 3))
    assert peer_gguf.interleaved(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
