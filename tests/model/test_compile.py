"""Slices by torch's compiler give what the plain graphs give, for any number of tokens; where they are refused."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.config import EngineOptions
from hpcdecode.engine.engine import Engine
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.ranks.team import assemble


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_compiled_slices_equal_plain_ones(checkpoint, monkeypatch, tmp_path, name):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = load_split(checkpoint(name), dtype="float32", inductor=True)
    plain = load_split(checkpoint(name), dtype="float32")
    for tokens in (1, 6, 11):  # the second compiles slices of any number of tokens, and the third compiles none
        ids, positions = torch.randint(0, plain.vocab_size, (tokens,)), torch.arange(tokens)
        contexts = [(ids, positions, torch.arange(tokens))] * 2
        o = None
        for layer, shape in enumerate(plain.attends):
            results = [m.slice(layer, o, c) for m, c in zip((compiled, plain), contexts, strict=True)]
            for a, b in zip(results[0][:3], results[1][:3], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            contexts = [context for *_, context in results]
            o = torch.randn(tokens, shape.out_columns)
        logits = [m.logits(o, c) for m, c in zip((compiled, plain), contexts, strict=True)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert list(tmp_path.iterdir())  # what it compiled


def test_on_cpus_it_is_refused(checkpoint):
    options = EngineOptions(model=str(checkpoint("llama3")), compile=True)
    with pytest.raises(UserError, match="--compile: expected S-ranks on GPUs, got cpu"):
        Engine(options, assemble(None))
