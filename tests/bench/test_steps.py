"""`hpcdecode bench steps` compares decode steps by layers and in one call with the bytes that they must move."""

from __future__ import annotations

import argparse

import pytest
import torch

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import steps
from hpcdecode.bench.mixed_configs import WITH_EXPERTS
from hpcdecode.bench.mixed_models import touched_bytes
from hpcdecode.errors import UserError
from hpcdecode.model import load_split


def test_rows_read_the_weights_of_the_experts_that_they_choose():
    sizes = WITH_EXPERTS["granite-4-h-tiny"].sizes
    experts = 2 * sizes["num_hidden_layers"] * 64 * 3 * sizes["hidden_size"] * sizes["intermediate_size"]
    one, two, all_ = (touched_bytes("granite-4-h-tiny", rows) for rows in (1, 2, 10**6))
    assert all_ - one == pytest.approx(experts * (1 - 6 / 64))
    assert all_ - two == pytest.approx(experts * (1 - 6 / 64) ** 2)


def test_the_bytes_of_a_step_by_hand():
    latent = LayerShape(kv_heads=1, k_dim=576, v_dim=512, q_heads=16, scale=1.0, latent=True)
    state = RecurrentShape(heads=8, k_heads=1, k_dim=16, v_dim=32, taps=0)
    weights = touched_bytes("deepseek-v2", 3)
    assert steps.step_bytes("deepseek-v2", [state], 3, 64) - weights == 3 * 2 * 4 * 8 * 16 * 32
    assert steps.step_bytes("deepseek-v2", [latent], 3, 64) - weights == 3 * 64 * 2 * 576


@pytest.mark.parametrize("name", ["deepseek_v2", "granitemoehybrid"])
def test_both_ways_are_measured(checkpoint, name):
    model = load_split(checkpoint(name), dtype="bfloat16")
    found = list(steps.measure("deepseek-v2", model, 2, 3, torch.get_num_threads(), 1))
    assert [case["unit"] for case in found] == ["ms", "CPU ms"] * 2
    assert "by layers" in found[0]["case"] and "fused" in found[2]["case"]
    assert all(case["value"] > 0 and case["ratio"] > 0 for case in found)


def test_numbers_below_one_are_refused(tmp_path):
    given = argparse.Namespace(model=[], rows=[4, 0], context=1, threads=1, passes=1, work=tmp_path)
    with pytest.raises(UserError, match="--rows: expected 1 or more, got 0"):
        steps.run(given)
