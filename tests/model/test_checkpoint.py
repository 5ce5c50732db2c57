"""Weights come from safetensors in place; whatever is wrong with a model directory is said clearly."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.skeleton import skeleton
from hpcdecode.model.frontend.sources import find_sources
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.frontend.weights import Weights
from hpcdecode.model.run.load import parse_dtype
from tests.support.isas import use_isa
from tests.support.mappings import resident_bytes
from tests.support.models import ARCHITECTURES, save

CPU = torch.device("cpu")


@pytest.fixture
def llama(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("llama2"), tmp_path / "model")


def read(path, stackable=(), dtype=torch.float32):
    """All weights of `path`, without a trace."""
    config = read_config(path)
    tensors = open_checkpoint(path, config.num_hidden_layers)
    like = skeleton(config, dtype).state_dict()
    sources = find_sources(config, dtype, tensors, like, stackable)
    wanted = {name: Meta.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in like.items()}
    return Weights(path, tensors, sources, wanted, CPU)


def mapped(path) -> list[range]:
    """Address ranges of this process that map files under `path`."""
    with open("/proc/self/maps") as maps:
        found = [line.split()[0].split("-") for line in maps if str(path) in line]
    return [range(int(a, 16), int(b, 16)) for a, b in found]


def test_weights_of_the_checkpoints_dtype_are_used_where_they_lie(checkpoint):
    path = checkpoint("llama2")
    weights = read(path)
    assert all(any(w.data_ptr() in r for r in mapped(path)) for w in weights.values())


def test_pages_of_other_mappings_of_a_file_are_kept(checkpoint):
    """Pages are forgotten at addresses that are held: of others nobody knows what lies there by now."""
    path = checkpoint("llama3")
    other = np.memmap(path / "model.safetensors", mode="c")
    other[-1] ^= 255  # in this mapping alone, and lost if its pages are forgotten
    changed = int(other[-1])
    stored = next(iter(open_checkpoint(path).values()))
    own = stored()
    before, resident = own.clone(), resident_bytes(own.data_ptr())
    stored.mapped.forget_pages()
    assert resident > resident_bytes(own.data_ptr()) == 0
    assert torch.equal(own, before) and int(other[-1]) == changed


def test_experts_of_the_checkpoints_dtype_are_used_where_they_lie(checkpoint):
    path = checkpoint("mixtral")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stack, merged = read(path, {name})[name], read(path)[name]
    assert isinstance(stack, Stack) and stack.shape == tuple(merged.shape) == (4, 256, 64)
    assert all(any(p.data_ptr() in r for r in mapped(path)) for pieces in stack for p in pieces)
    assert torch.equal(torch.stack([torch.cat(pieces) for pieces in stack]), merged)


def test_split_binds_experts_in_place_where_there_are_no_gemms_of_packed_weights(checkpoint, monkeypatch):
    use_isa(monkeypatch, "generic")
    path = checkpoint("mixtral")
    model = load_split(path, dtype="float32")
    stacks = [w for i in range(len(model.attends) + 1) for w in model.weights(i) if isinstance(w, Stack)]
    assert len(stacks) == 6
    ranges = mapped(path)
    assert all(any(p.data_ptr() in r for r in ranges) for stack in stacks for pieces in stack for p in pieces)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek_v3"])
def test_weights_are_those_transformers_loads(name, checkpoint):
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.bfloat16).state_dict()
    got = read(checkpoint(name), dtype=torch.bfloat16)
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key


def test_many_shards_are_one_model(tmp_path):
    config = ARCHITECTURES["qwen2"]()
    save(config, tmp_path / "one")
    save(config, tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = read(tmp_path / "one"), read(tmp_path / "many")
    assert set(one) == set(many) and all(torch.equal(one[k], many[k]) for k in one)
    (tmp_path / "many" / sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))[1]).unlink()
    with pytest.raises(UserError, match=r"lacks 1 of \d+ weight files: model-00002"):
        read(tmp_path / "many")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_checkpoints_are_kept_or_widened(tmp_path, dtype):
    path = save(ARCHITECTURES["gpt2"](), tmp_path, dtype=dtype)
    assert parse_dtype("auto", path) == dtype
    own, wide = read(path, dtype=dtype), read(path)
    assert all(w.dtype == dtype and torch.equal(w.float(), wide[name]) for name, w in own.items())


def test_tied_head_comes_from_the_embedding(checkpoint):
    path = checkpoint("llama3")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    weights = read(path)
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def edit_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def only_bin(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


FAULTS = {
    "no directory": (lambda p: shutil.rmtree(p), "does not exist"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config\.json is missing"),
    "config no JSON": (lambda p: (p / "config.json").write_text("{"), r"config\.json: expected a JSON object"),
    "unknown architecture": (
        lambda p: edit_config(p, model_type="nobody", architectures=["NobodyForCausalLM"]),
        "nobody",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"expected model\.safetensors"),
    "only bin": (only_bin, r"\.bin weights only; expected safetensors"),
    "truncated": (truncate, r"model\.safetensors \(\d+ bytes\) is truncated"),
    "corrupt": (lambda p: (p / "model.safetensors").write_bytes(b"x" * 999), "truncated or not safetensors"),
    "tensor missing": (
        lambda p: edit(p, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"layers\.1\.mlp\.up_proj",
    ),
    "shape": (
        lambda p: edit(p, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:500]})),
        r"'lm_head.weight' has shape \[500, 64\], config\.json asks for \[512, 64\]",
    ),
    "layers": (lambda p: edit_config(p, num_hidden_layers=4), "states 4 layers, the weights have 3"),
    "index": (
        lambda p: (p / "model.safetensors.index.json").write_text("[]"),
        r"index\.json is not a safetensors index",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_directory_is_named(fault, llama):
    damage, message = FAULTS[fault]
    damage(llama)
    with pytest.raises(UserError, match=message):
        read(llama)


def test_unknown_dtype_is_named(llama):
    with pytest.raises(UserError, match="dtype int8 is not known: give one of float32, bfloat16, float16"):
        load_split(llama, dtype="int8")
