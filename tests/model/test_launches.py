"""What a layer launches on a device, counted, and that fewer operators compute the same."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.model import load_split
from hpcdecode.model.lower.compile import _merged, runnable
from hpcdecode.model.run import bound_slice
from tests.support.launches import as_traced, of_a_layer, on_a_device


@pytest.mark.parametrize(
    ("name", "traced", "launched"), [("llama3", 38, 23), ("qwen3", 54, 27), ("gemma3", 70, 45), ("mixtral", 90, 90)]
)
def test_a_layer_launches_fewer_kernels_than_were_traced(checkpoint, name, traced, launched):
    assert of_a_layer(checkpoint(name), as_traced).kernels >= traced
    assert of_a_layer(checkpoint(name), on_a_device).kernels <= launched


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_fused_norms_round_where_the_model_does(checkpoint, monkeypatch, name, dtype):
    made = []
    for compile in (lambda graph, *_, rows=0, **__: runnable(*_merged(graph, rows)), on_a_device):
        monkeypatch.setattr(bound_slice, "compile_graph", compile)
        model = load_split(checkpoint(name), dtype=dtype)
        random = torch.Generator().manual_seed(1)
        context, o = (torch.arange(40), torch.arange(40), torch.arange(40)), None
        results = []
        for layer, shape in enumerate(model.attends):
            rows, context = model.slice(layer, o, context)
            results += rows
            o = torch.randn(40, shape.out_columns, generator=random).to(model.dtype)
        made.append([*results, model.logits(o, context)])
    exact = dtype == "bfloat16"  # float32 sums may be in another order
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


def test_q_k_and_v_lie_side_by_side(checkpoint, monkeypatch):
    from hpcdecode.exchange.base import side_by_side

    monkeypatch.setattr(bound_slice, "compile_graph", on_a_device)
    model = load_split(checkpoint("llama3"), dtype="float32")
    rows, _ = model.slice(0, None, (torch.arange(5), torch.arange(5), torch.arange(5)))
    whole = side_by_side(*rows)
    assert whole is not None and torch.equal(whole, torch.cat(rows, 1))


def test_weights_that_are_merged_are_held_once(checkpoint, monkeypatch):
    monkeypatch.setattr(bound_slice, "compile_graph", on_a_device)
    model = load_split(checkpoint("llama3"), dtype="float32")
    merged = [r for r in model.compiled(1).recipes if len(r.sources) > 1]
    assert sorted(len(r.sources) for r in merged) == [2, 3]  # gate and up; q, k and v
    traced = sum(p.numel() for p in (w for w in model.weights(1)))
    monkeypatch.setattr(bound_slice, "compile_graph", as_traced)
    assert traced == sum(w.numel() for w in load_split(checkpoint("llama3"), dtype="float32").weights(1))
