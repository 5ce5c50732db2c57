"""Models whose layers keep states: their slices and states give transformers' logits, however tokens come."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, state_bytes
from hpcdecode.model import load_split
from hpcdecode.model.frontend.elementwise import PIECE, steady
from tests.support.hybrids import HYBRIDS
from tests.support.steps import Attention, step

A, B = 70, 37  # tokens of two rows
BATCHES = (
    [(0, p) for p in range(40)],
    [(0, p) for p in range(40, A - 1)] + [(1, p) for p in range(B - 1)],
    [(1, B - 1), (0, A - 1)],
)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_equal_transformers(name, checkpoint):
    path = checkpoint(name)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, 490, (n,), generator=generator).tolist() for n in (A, B)]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = [reference(torch.tensor([row]), use_cache=False).logits[0] for row in ids]
    model = load_split(path, dtype="float32")
    attention = Attention(model)
    for batch in BATCHES:
        got = step(model, attention, [(row, at, ids[row][at]) for row, at in batch], list(range(len(batch))))
        want = torch.stack([wanted[row][at] for row, at in batch])
        torch.testing.assert_close(got, want, rtol=0, atol=5e-4)  # of a deviation of 1; 2e-5 but for the delta rule
        assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_a_convolution_and_its_recurrence_are_one_exchange(checkpoint):
    linear, _, attends = load_split(checkpoint("qwen3_next"), dtype="float32").attends
    assert isinstance(attends, LayerShape) and isinstance(linear, RecurrentShape)
    assert (linear.taps, linear.heads, linear.k_heads, linear.k_dim, linear.v_dim) == (4, 4, 2, 16, 24)
    assert linear.delta and linear.normalised and linear.silu and linear.has_beta and not linear.has_rate
    assert linear.row_columns == 2 * 2 * 16 + 4 * 24 + 4 + 4 and linear.out_columns == 4 * 24


def test_states_are_described(checkpoint):
    model = load_split(checkpoint("mamba2"), dtype="bfloat16", weights=False)
    assert model.describe()["state_bytes"] == state_bytes(model.attends) > 0
    assert model.describe()["kv_bytes_per_token"] == 0
    assert model.attends[0].widths[-1] == 2 * model.attends[0].heads  # float32 in columns of two bytes


@pytest.mark.parametrize("name", ["silu", "softplus", "cos", "exp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_has_the_same_bits_at_every_place(name, dtype):
    function = steady(getattr(torch.ops.aten, name).default)
    x = torch.randn(PIECE + 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = function(x)
    for first, last in ((0, 1), (5, 18), (1, PIECE + 3), (PIECE - 9, PIECE + 40)):
        assert torch.equal(function(x[first:last]), whole[first:last])
