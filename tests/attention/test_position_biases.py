"""Biases of scores by distance, and sinks of tokens: kernels of decoding and of prompts against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.base import KV_DTYPES
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.shapes import PositionBias
from tests.support.attention_cases import expected, ints, make_batch, run_batch, shape


def biased(dim, extent, seed=1):
    profiles = np.random.default_rng(seed).standard_normal((dim, extent), np.float32)
    return PositionBias(dim, extent, profiles.tobytes())


LINEAR = PositionBias(2, 0)
SHAPES = {
    "groups": shape(2, 32, 4, bias=biased(16, 100)),
    "one profile of one distance": shape(1, 16, 1, bias=biased(1, 1)),
    "a window": shape(2, 16, 2, window=70, bias=biased(4, 70)),
    "chunks": shape(2, 16, 2, window=48, chunked=True, bias=biased(4, 48)),
    "longer than all": shape(2, 24, 1, bias=biased(3, 5000), row_sinks=True),
    "sinks of tokens": shape(2, 16, 3, row_sinks=True),
    "sinks of heads": shape(2, 16, 2, sinks=True, bias=biased(2, 33)),
    "linear": shape(3, 32, 1, bias=LINEAR),
}
LENGTHS, COUNTS = [1, 63, 64, 65, 700, 1024, 2100], [1, 1, 1, 1, 3, 1, 2]


def batch_of(layer, lengths, counts, dtype=torch.float32):
    batch = make_batch(layer, lengths, counts, dtype)
    if layer.bias == LINEAR:  # slopes are positive
        for rows in batch.rows:
            rows[:, layer.own_q_columns : layer.own_q_columns + layer.bias_columns].abs_()
    return batch


@pytest.fixture(params=list(SHAPES))
def layer(request):
    return SHAPES[request.param]


def test_decoding_adds_them(layer, isa):
    batch = batch_of(layer, LENGTHS, COUNTS)
    torch.testing.assert_close(run_batch(batch, "float32").double(), expected(batch, "float32"), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_decoding_over_every_data_type(kv_dtype, layer):
    batch = batch_of(layer, LENGTHS, COUNTS)
    got, want = run_batch(batch, kv_dtype).double(), expected(batch, kv_dtype)
    assert (got - want).norm() < 0.02 * want.norm()
    reference = run_batch(batch, kv_dtype, backend="reference", poisoned=False).double()
    torch.testing.assert_close(reference, want, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_row_alone_is_a_row_in_company(dtype, kv_dtype, layer, isa):
    batch = batch_of(layer, LENGTHS, [1] * len(LENGTHS), dtype)
    together = run_batch(batch, kv_dtype, threads=2)
    for i in range(len(LENGTHS)):
        assert torch.equal(run_batch(batch, kv_dtype, which=[i])[0], together[i])


def prompt(layer, dtype, length, cuts, attention):
    """Output rows of a prompt that comes in chunks which end at `cuts`, and those of plain torch in float64."""
    batch = batch_of(layer, [length], [length], dtype)
    (rows,), sinks = batch.rows, batch.sinks
    q, k, v = rows.split([layer.q_columns, layer.k_columns, layer.v_columns], 1)
    packed = torch.empty(attention.packed_bytes(0, length), dtype=torch.uint8)
    out = torch.empty(length, layer.out_columns, dtype=dtype)
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        own = slice(begin, end)
        attention.attend(0, [packed], [begin], [end - begin], q[own], k[own], v[own], out[own], sinks)
    batch.rows = [rows.float()]
    return out, expected(batch, "float32")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_prompts_add_them(dtype, bound, layer, isa):
    attention = CpuPromptAttention([layer], dtype=str(dtype).removeprefix("torch."), threads=2)
    whole, want = prompt(layer, dtype, 333, [], attention)
    assert (whole.double() - want).norm() < bound * want.norm()
    cut, _ = prompt(layer, dtype, 333, [1, 64, 65, 200, 311], attention)
    assert torch.equal(cut, whole)


def test_prompts_by_torch_add_them(layer):
    attention = TorchPromptAttention([layer], torch.float32, torch.device("cpu"))
    got, want = prompt(layer, torch.float32, 333, [1, 64, 200], attention)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=1e-4)


def test_biases_are_those_of_the_distance():
    """With keys of zeros the weights are those of the profile alone."""
    layer = shape(1, 16, 1, bias=PositionBias(1, 3, np.log([1.0, 2.0, 4.0]).astype(np.float32).tobytes()))
    rows = torch.zeros(5, layer.row_columns)
    rows[:, layer.own_q_columns] = 1.0  # what mixes the profile
    rows[:, -16:] = torch.eye(5, 16)
    store = open_kv_cache([layer], kv_dtype="float32", capacity_tokens=64, max_sequences=1)
    store.extend(ints([0]), ints([5]))
    out = torch.empty(5, 16)
    store.attend(0, ints([0]), ints([5]), rows, out)
    torch.testing.assert_close(out[4, :5], torch.tensor([1.0, 1.0, 4.0, 2.0, 1.0]) / 9)


def test_shapes_that_make_no_sense_are_refused():
    layer = SHAPES["groups"]
    for wrong in (
        replace(layer, softcap=20.0),
        replace(layer, kv_heads=1, q_heads=8, k_dim=32, v_dim=32, latent=True),
        replace(layer, sinks=True, row_sinks=True),
    ):
        with pytest.raises(ValueError, match="layer 0: "):
            open_kv_cache([wrong], kv_dtype="float32", capacity_tokens=64, max_sequences=1)
    with pytest.raises(ValueError, match=r"q\.k alone"):
        open_kv_cache([layer], kv_dtype="float32", capacity_tokens=64, max_sequences=1, backend="attn_cuda")
