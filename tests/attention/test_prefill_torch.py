"""Attention of prompts by torch, as on a device, against float64: whole, in chunks, with windows, softcap and sinks."""

import pytest
import torch

from hpcdecode.attention import prefill_torch as attention_torch
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from tests.support.attention_cases import expected, make_batch, shape
from tests.support.told import Told

LENGTHS = (1, 64, 130)
SHAPES = {
    "mha64": shape(2, 64, 1),
    "gqa4_128": shape(2, 128, 4),
    "mla": shape(3, 48, 1, v_dim=32),
    "latent5_40": shape(1, 40, 5, v_dim=32, latent=True),
    "latent3_24_window_sinks_softcap": shape(1, 24, 3, v_dim=24, latent=True, window=60, sinks=True, softcap=20.0),
    "latent2_40_chunks": shape(1, 40, 2, v_dim=32, latent=True, window=50, chunked=True),
    "gqa2_64_softcap": shape(1, 64, 2, softcap=30.0),
    "gqa6_33_window": shape(2, 33, 6, window=50),
    "gqa4_33_chunks": shape(2, 33, 4, window=50, chunked=True),
    "gqa4_64_sinks_window": shape(1, 64, 4, window=70, sinks=True),
}


@pytest.mark.parametrize("every", [1000, 50, 7])
@pytest.mark.parametrize("name", SHAPES)
def test_matches_float64(name, every, monkeypatch):
    monkeypatch.setattr(attention_torch, "_SCORE_BYTES", 20_000)  # some queries at a time
    s, batch = SHAPES[name], make_batch(SHAPES[name], LENGTHS, LENGTHS)
    prompts = TorchPromptAttention([s], torch.float32, torch.device("cpu"))
    packed = [torch.full((prompts.packed_bytes(0, n),), 255, dtype=torch.uint8) for n in LENGTHS]
    out = [torch.full((n, s.out_columns), float("nan")) for n in LENGTHS]
    for start in range(0, max(LENGTHS), every):
        now = [i for i, n in enumerate(LENGTHS) if n > start]
        counts = [min(every, LENGTHS[i] - start) for i in now]
        rows = torch.cat([batch.rows[i][start : start + n] for i, n in zip(now, counts, strict=True)])
        q, k, v = rows.split([s.q_columns, s.k_columns, s.v_columns], dim=1)
        o = torch.empty(len(rows), s.out_columns)
        prompts.attend(0, [packed[i] for i in now], [start] * len(now), counts, q, k, v, o, batch.sinks)
        for i, part in zip(now, o.split(counts), strict=True):
            out[i][start : start + len(part)] = part
    torch.testing.assert_close(torch.cat(out).double(), expected(batch, "float32"), atol=2e-5, rtol=0)


def test_skipped_queries_rows_are_left_alone():
    s, batch = SHAPES["gqa4_64_sinks_window"], make_batch(SHAPES["gqa4_64_sinks_window"], LENGTHS, LENGTHS)
    prompts, skipped_queries = TorchPromptAttention([s], torch.float32, torch.device("cpu")), [1, 60, 0]
    packed = [torch.zeros(prompts.packed_bytes(0, n), dtype=torch.uint8) for n in LENGTHS]
    q, k, v = torch.cat(batch.rows).split([s.q_columns, s.kv_heads * s.k_dim, s.kv_heads * s.v_dim], dim=1)
    out = torch.full((len(q), s.out_columns), float("nan"))
    prompts.attend(0, packed, [0] * len(LENGTHS), list(LENGTHS), q, k, v, out, batch.sinks, skipped_queries)
    wanted = expected(batch, "float32").split(LENGTHS)
    for got, want, skip in zip(out.split(LENGTHS), wanted, skipped_queries, strict=True):
        assert got[:skip].isnan().all()
        torch.testing.assert_close(got[skip:].double(), want[skip:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name, s in SHAPES.items() if s.latent or s.softcap or s.sinks or s.window])
def test_a_device_is_told_what_to_do_without_a_wait(name):
    """On the meta device, where a mask of the host would raise; flash kernels of torch are not for it."""
    s, n, device = SHAPES[name], 100, torch.device("meta")
    prompts = TorchPromptAttention([s], torch.bfloat16, device)
    rows = torch.zeros(n, s.row_columns, dtype=torch.bfloat16, device=device)
    q, k, v = rows.split([s.q_columns, s.k_columns, s.v_columns], dim=1)
    packed = torch.zeros(prompts.packed_bytes(0, n), dtype=torch.uint8, device=device)
    out = torch.zeros(n, s.out_columns, dtype=torch.bfloat16, device=device)
    sinks = torch.zeros(s.q_heads, device=device) if s.sinks else None
    with Told() as told:
        prompts.attend(0, [packed], [0], [n], q, k, v, out, sinks)
    assert told.operators and not told.copies
