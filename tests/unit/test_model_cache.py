"""Traces kept on disk: the same model again, and no harm from whatever lies there."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.model import cache, load_split
from hpcdecode.model.config import read_config
from hpcdecode.model.trace import trace
from tests.models import ARCHITECTURES, Attention, step


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_restored_trace_is_the_trace(name, checkpoint):
    config = read_config(checkpoint(name))
    made = trace(config, torch.bfloat16)
    again = cache.restored(cache.stored(made), made.model)
    assert str(again.graph) == str(made.graph)
    assert cache.stored(again) == cache.stored(made)


def test_a_cached_model_gives_the_same_logits_without_tracing(directory, checkpoint, monkeypatch):
    tokens = [(0, p, p + 2) for p in range(9)]
    logits = []
    for _ in range(2):
        model = load_split(checkpoint("gemma2"), dtype="float32")
        logits.append(step(model, Attention(model), tokens, [3, 8]))
        monkeypatch.setattr(cache, "trace", None)  # the second time it must not be called
    assert torch.equal(*logits)
    assert [f.suffix for f in directory.iterdir()] == [".trace"]


def test_another_dtype_or_config_is_another_trace(checkpoint):
    config, other = read_config(checkpoint("llama3")), read_config(checkpoint("llama2"))
    keys = {cache.key(config, torch.float32), cache.key(config, torch.bfloat16), cache.key(other, torch.float32)}
    assert len(keys) == 3 and cache.key(config, torch.float32) in keys


@pytest.mark.parametrize("damage", [b"", b"\x00", b"not msgpack", None])
def test_a_damaged_file_is_made_anew(directory, checkpoint, damage):
    config = read_config(checkpoint("opt"))
    made = cache.cached_trace(config, torch.float32)
    (file,) = directory.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2] if damage is None else damage)
    assert str(cache.cached_trace(config, torch.float32).graph) == str(made.graph)
    assert file.read_bytes() == good


def test_a_directory_that_cannot_be_written_is_done_without(tmp_path, checkpoint, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("HPCDECODE_CACHE", str(blocker / "cache"))
    assert len(cache.cached_trace(read_config(checkpoint("opt")), torch.float32).attends) == 3


@pytest.mark.parametrize("name", ["os.system", "aten.add", "operator.attrgetter", "aten.__class__.mro"])
def test_only_operators_can_be_named(name):
    with pytest.raises((cache.Unstorable, AttributeError)):
        target = cache.target_of(name)
        assert not isinstance(target, torch._ops.OpOverload)
        raise AttributeError
