"""Attention of prompts by torch, as on a device, against float64: whole, in chunks, with windows, softcap and sinks."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hpcdecode.attention import prefill_torch as attention_torch
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.shapes import IndexerShape
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
    "latent4_40_pools": shape(1, 40, 4, v_dim=32, latent=True, indexer=IndexerShape(20, 5, 16, 4)),
    "latent4_40_chosen": shape(1, 40, 4, v_dim=32, latent=True, indexer=IndexerShape(20, 5, 16)),
    "latent3_40_entries": shape(1, 40, 3, latent=True, window=24, sinks=True, compress_rate=16),
    "latent3_40_chosen_entries": shape(
        1, 40, 3, latent=True, window=24, sinks=True, compress_rate=4, indexer=IndexerShape(7, 32, 16)
    ),
    "gqa2_40_pools": shape(2, 40, 2, indexer=IndexerShape(20, 5, 16, 4)),
    "gqa2_40_blocks": shape(2, 40, 2, v_dim=32, sinks=True, indexer=IndexerShape(24, 2, 16, 8, 1)),
    "gqa2_64_softcap": shape(1, 64, 2, softcap=30.0),
    "gqa6_33_window": shape(2, 33, 6, window=50),
    "gqa4_33_chunks": shape(2, 33, 4, window=50, chunked=True),
    "gqa4_64_sinks_window": shape(1, 64, 4, window=70, sinks=True),
}
BY_SCORES = [name for name, s in SHAPES.items() if s.latent or s.softcap or s.sinks or (s.window and not s.chunked)]
OF_ALL = [name for name in BY_SCORES if not SHAPES[name].indexer]  # index scores are in float32
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [1000, 50, 7])
@pytest.mark.parametrize("name", SHAPES)
def test_matches_float64(name, every, dtype, device, monkeypatch):
    """Of float32 to 2e-5, of bfloat16 to a hundredth of the largest value."""
    monkeypatch.setattr(attention_torch, "_SCORE_BYTES", 20_000)  # some queries at a time
    s, batch = SHAPES[name], make_batch(SHAPES[name], LENGTHS, LENGTHS, dtype)
    prompts = TorchPromptAttention([s], dtype, torch.device(device))
    packed = [torch.full((prompts.packed_bytes(0, n),), 255, dtype=torch.uint8, device=device) for n in LENGTHS]
    out = [torch.full((n, s.out_columns), float("nan"), device=device) for n in LENGTHS]
    sinks = None if batch.sinks is None else batch.sinks.to(device)
    for start in range(0, max(LENGTHS), every):
        now = [i for i, n in enumerate(LENGTHS) if n > start]
        counts = [min(every, LENGTHS[i] - start) for i in now]
        rows = torch.cat([batch.rows[i][start : start + n] for i, n in zip(now, counts, strict=True)]).to(device)
        q, k, v = rows.split([s.q_columns, s.k_columns, s.v_columns], dim=1)
        o = torch.empty(len(rows), s.out_columns, dtype=dtype, device=device)
        prompts.attend(0, [packed[i] for i in now], [start] * len(now), counts, q, k, v, o, sinks)
        for i, part in zip(now, o.split(counts), strict=True):
            out[i][start : start + len(part)] = part
    wanted = expected(batch, "float32")
    limit = 2e-5 if dtype == torch.float32 else 1e-2 * wanted.abs().max().item()
    torch.testing.assert_close(torch.cat(out).cpu().double(), wanted, atol=limit, rtol=0)


def test_a_layer_without_an_indexer_attends_to_the_choice_before():
    with_own = SHAPES["latent4_40_chosen"]
    taking = shape(1, 40, 4, v_dim=32, latent=True, indexer=IndexerShape(20))
    batch, later = make_batch(with_own, LENGTHS, LENGTHS), make_batch(taking, LENGTHS, LENGTHS, seed=1)
    prompts = TorchPromptAttention([with_own, taking], torch.float32, torch.device("cpu"))
    for layer, (s, own) in enumerate(((with_own, batch), (taking, later))):
        packed = [torch.zeros(prompts.packed_bytes(layer, n), dtype=torch.uint8) for n in LENGTHS]
        q, k, v = torch.cat(own.rows).split([s.q_columns, s.k_columns, s.v_columns], dim=1)
        out, skipped = torch.zeros(len(q), s.out_columns), [0, 3, 9 * layer]
        prompts.attend(layer, packed, [0] * len(LENGTHS), list(LENGTHS), q, k, v, out, None, skipped)
    both = make_batch(with_own, LENGTHS, LENGTHS)
    for i, (first, second) in enumerate(zip(batch.rows, later.rows, strict=True)):
        own_q, index_q, _, index_k = first.split([s.own_q_columns, 5 * 17, s.own_k_columns, 16], 1)
        both.rows[i] = torch.cat([second[:, : own_q.shape[1]], index_q, second[:, own_q.shape[1] :], index_k], 1)
    wanted = expected(both, "float32").split(LENGTHS)
    torch.testing.assert_close(out.split(LENGTHS)[2][9:].double(), wanted[2][9:], atol=2e-5, rtol=0)


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


def attend_on(device, name, dtype, n=100):
    """Attend from a prompt without numbers that matter."""
    s = SHAPES[name]
    prompts = TorchPromptAttention([s], dtype, torch.device(device))
    rows = torch.zeros(n, s.row_columns, dtype=dtype, device=device)
    q, k, v = rows.split([s.q_columns, s.k_columns, s.v_columns], dim=1)
    packed = torch.zeros(prompts.packed_bytes(0, n), dtype=torch.uint8, device=device)
    out = torch.zeros(n, s.out_columns, dtype=dtype, device=device)
    prompts.attend(0, [packed], [0], [n], q, k, v, out, torch.zeros(s.q_heads, device=device) if s.sinks else None)


class Products(TorchFunctionMode):
    """Notes the data types of what is multiplied as matrices."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("bmm", "einsum", "matmul", "mm"):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OF_ALL)
def test_scores_are_products_of_the_models_data_type(name, dtype):
    """Those of float32 do not run on tensor cores."""
    with Products() as products:
        attend_on("meta", name, dtype)
    assert products.dtypes == {dtype}


@pytest.mark.parametrize("name", ["mha64", "gqa4_128", "gqa4_33_chunks"])
def test_no_kernel_that_plans_each_length_is_used(name, monkeypatch):
    """cuDNN plans every new length of keys. On return all kernels may be used again."""
    enabled = []

    def noted(*args, **kwargs):
        flags = torch.backends.cuda
        enabled.append((flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.cudnn_sdp_enabled()))
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(attention_torch, "scaled_dot_product_attention", noted)
    attend_on("cpu", name, torch.bfloat16)
    assert enabled and set(enabled) == {(True, True, False)}
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", BY_SCORES)
@pytest.mark.parametrize("length", [200, 5000])
def test_scores_of_some_queries_keep_to_their_bytes(name, length, monkeypatch):
    monkeypatch.setattr(attention_torch, "_SCORE_BYTES", 1 << 18)
    s = SHAPES[name]
    some = attention_torch._queries_at_once(s, length)
    ends = np.arange(some, length + 1)
    seen = (ends - s.first_seen(ends - some)).max()
    assert 4 * s.q_heads * some * seen <= 1 << 18 or some == 1
    if s.window and length == 5000:
        assert 4 * s.q_heads * (some + 1) * (some + 1 + s.window) > 1 << 18


@pytest.mark.parametrize("name", BY_SCORES)
def test_a_device_is_told_what_to_do_without_a_wait(name):
    """On the meta device, where a mask of the host would raise; fused kernels of torch are not for it."""
    with Told() as told:
        attend_on("meta", name, torch.bfloat16)
    assert told.operators and not told.copies
