"""Traces kept on disk: the same model again, and no harm from whatever lies there."""

from __future__ import annotations

import shutil
import sys
from unittest.mock import Mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend import cache, trace_file
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.system.model_path import demo_directory
from tests.support.commands import run
from tests.support.steps import Attention, step


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def traced(checkpoint, tmp_path, monkeypatch):
    """Give the checkpoint of an architecture whose trace is in the cache directory, and nothing else."""

    def get(name):
        path = checkpoint(name)
        cache.cached_trace(path, torch.float32)
        made = cache.directory() / f"{cache.key(path, torch.float32)}.trace"
        monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path / "cache"))
        cache.directory().mkdir()
        shutil.copy(made, cache.directory())
        return path

    return get


@pytest.fixture(scope="module")
def trace_of_opt(checkpoint):
    return cache.cached_trace(checkpoint("opt"), torch.float32)


@pytest.fixture
def tracer(trace_of_opt, monkeypatch):
    """Stands in for what traces a model, which takes seconds: it returns the trace of opt and counts its calls."""
    stand_in = Mock(return_value=trace_of_opt)
    monkeypatch.setattr(cache, "trace", stand_in)
    return stand_in


def test_a_cached_model_gives_the_same_logits_without_tracing(directory, checkpoint, monkeypatch):
    tokens = [(0, p, p + 2) for p in range(9)]
    logits = []
    for _ in range(2):
        model = load_split(checkpoint("gemma2"), dtype="float32")
        logits.append(step(model, Attention(model), tokens, [3, 8]))
        for name in ("read_config", "trace", "find_sources"):
            monkeypatch.setattr(cache, name, None)  # the second time they must not be called
    assert torch.equal(*logits)
    assert sorted(f.suffix for f in directory.iterdir()) == [".sources", ".trace"]


def test_a_trace_that_is_made_is_announced_if_it_takes_long(directory, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(cache, "LONG", 0.01)
    checkpoint("llama3")
    caplog.set_level("INFO", cache.logger.name)
    line = f"hpcdecode: tracing LlamaForCausalLM: 3 layers (the first time; kept in {directory})"
    for said in ([line], []):
        caplog.clear()
        load_split(checkpoint("llama3"), dtype="float32", weights=False, announce=True)
        assert [r.getMessage() for r in caplog.records if r.name == cache.logger.name] == said


def test_a_short_trace_and_other_ranks_are_silent(directory, checkpoint, monkeypatch, caplog):
    caplog.set_level("INFO", cache.logger.name)
    monkeypatch.setattr(cache, "LONG", 600.0)
    cache.cached_trace(checkpoint("opt"), torch.float32, announce=True)
    monkeypatch.setattr(cache, "LONG", 0.0)
    cache.cached_trace(checkpoint("opt"), torch.bfloat16)
    assert not [r for r in caplog.records if r.name == cache.logger.name]


def test_a_warm_start_imports_neither_configs_nor_models_of_transformers(directory, checkpoint):
    """They would bring torch's compiler and sympy: most of the time that imports take."""
    code = (
        "import sys; from hpcdecode.model import load_split; from hpcdecode.data.prompts.tokenizer import Tokenizer; "
        "load_split(sys.argv[1], dtype='float32'); Tokenizer.load(sys.argv[2]); "
        "print([n for n in ('transformers.modeling_utils', 'torch._dynamo', 'sympy') if n in sys.modules])"
    )
    model = demo_directory() / "model"
    said = [run([sys.executable, "-c", code, model, model], timeout=120).stdout.strip() for _ in range(2)]
    assert said == ["['transformers.modeling_utils', 'torch._dynamo', 'sympy']", "[]"]


def test_sources_of_experts_are_kept(traced):
    load_split(traced("mixtral"), dtype="float32")
    (file,) = cache.directory().glob("*.sources")
    found = msgspec.msgpack.decode(cache.read(file), type=Sources)
    assert len(found.stacks) == 6 and len(found.stacks["model.layers.1.mlp.experts.gate_up_proj"]) == 4


def test_another_set_of_tensors_has_other_sources(traced, tmp_path):
    path = shutil.copytree(traced("llama2"), tmp_path / "model")
    load_split(path, dtype="float32")
    tensors = load_file(path / "model.safetensors")
    gone = tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 of"):
        load_split(path, dtype="float32")
    save_file({**tensors, "model.norm.weight": gone}, path / "model.safetensors", {"format": "pt"})
    load_split(path, dtype="float32")


def test_another_dtype_or_config_is_another_trace(checkpoint):
    one, other = checkpoint("llama3"), checkpoint("llama2")
    keys = {cache.key(one, torch.float32), cache.key(one, torch.bfloat16), cache.key(other, torch.float32)}
    assert len(keys) == 3 and cache.key(one, torch.float32) in keys


@pytest.mark.parametrize("damage", [b"", b"\x00", b"not msgpack", None])
def test_a_damaged_file_is_made_anew(directory, checkpoint, tracer, damage):
    made = cache.cached_trace(checkpoint("opt"), torch.float32)
    (file,) = directory.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2] if damage is None else damage)
    assert str(cache.cached_trace(checkpoint("opt"), torch.float32).graph) == str(made.graph)
    assert file.read_bytes() == good and tracer.call_count == 2


def test_a_directory_that_cannot_be_written_is_done_without(tmp_path, checkpoint, tracer, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("HPCDECODE_CACHE", str(blocker / "cache"))
    assert len(cache.cached_trace(checkpoint("opt"), torch.float32).attends) == 3 and tracer.call_count == 1


@pytest.mark.parametrize("name", ["os.system", "aten.add", "operator.attrgetter", "aten.__class__.mro"])
def test_only_operators_can_be_named(name):
    with pytest.raises((trace_file.Unstorable, AttributeError)):
        target = trace_file.target_of(name)
        assert not isinstance(target, torch._ops.OpOverload)
        raise AttributeError
