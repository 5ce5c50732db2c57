"""Every ISA of this machine x KV dtype x shape against float64, with poisoned output and poisoned blocks."""

from functools import lru_cache

import pytest
import torch

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES
from hpcdecode.attention.quantized import CODES
from hpcdecode.attention.reference import stored
from hpcdecode.attention.shapes import LayerShape
from tests.support.attention_cases import expected, make_batch, run_batch, shape

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 130, 512, 1023, 1024, 1025, 3000)
COUNTS = (1, 2, 3, 1, 5, 40, 1, 2, 1, 17, 1, 3, 2, 1, 4)


SHAPES = {
    "mha64": shape(2, 64, 1),
    "mha80": shape(2, 80, 1),
    "gqa4_128": shape(1, 128, 4),
    "gqa8_64": shape(1, 64, 8),
    "gqa2_96": shape(1, 96, 2),
    "gqa3_112": shape(1, 112, 3),
    "gqa5_192": shape(1, 192, 5),
    "gqa7_256_softcap": shape(1, 256, 7, softcap=30.0),
    "gqa6_33_window": shape(1, 33, 6, window=50),
    "gqa4_40_chunks": shape(1, 40, 4, window=50, chunked=True),
    "gqa16_64_sinks_window": shape(1, 64, 16, window=128, sinks=True),
    "gqa12_48_sinks": shape(1, 48, 12, sinks=True),
    "tiny": shape(3, 1, 1),
    "k7_v130": shape(2, 7, 3, v_dim=130),
    "mla_mqa": shape(1, 576, 32, v_dim=512),
    "latent_576_512": shape(1, 576, 128, v_dim=512, latent=True),
    "latent_40_24": shape(1, 40, 20, v_dim=24, latent=True),
    "latent_33_30_softcap_window": shape(1, 33, 5, v_dim=30, softcap=10.0, window=70, latent=True),
    "latent_48_48_sinks": shape(1, 48, 140, sinks=True, latent=True),
}

# Largest error as a share of max |v|. float32 activations; K and V taken as stored, so what is left is arithmetic.
BOUND = 1e-5
# avx512_bf16 and amx round queries and weights to bfloat16 (relative 2^-9 each) where bfloat16 holds K and V exactly.
BOUND_PAIRS = 1.2e-2


@lru_cache(maxsize=1)
def case(name):
    s = SHAPES[name]
    short = name in ("mla_mqa", "latent_576_512")
    batch = make_batch(s, LENGTHS[:9] if short else LENGTHS, COUNTS[:9] if short else COUNTS)
    return batch, {dtype: expected(batch, dtype) for dtype in (LATENT_KV_DTYPES if s.latent else KV_DTYPES)}


def bound(isa, kv_dtype):
    return BOUND_PAIRS if isa in ("avx512_bf16", "amx") and kv_dtype in ("bfloat16", *CODES) else BOUND


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", _attn_cpu.supported_isas())
@pytest.mark.parametrize("name", SHAPES)
def test_matches_float64(name, isa, kv_dtype, monkeypatch):
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    batch, answers = case(name)
    if kv_dtype not in answers:
        with pytest.raises(
            ValueError, match=f"expected float32, float16, bfloat16 or int8 for values in K, got {kv_dtype}"
        ):
            run_batch(batch, kv_dtype)
        return
    out = run_batch(batch, kv_dtype)
    error = (out.double() - answers[kv_dtype]).abs().max().item()
    scale = max(r[:, batch.shape.q_columns :].abs().max().item() for r in batch.rows)
    assert error <= bound(isa, kv_dtype) * scale


@pytest.mark.parametrize("isa", _attn_cpu.supported_isas())
def test_bfloat16_activations(isa, monkeypatch):
    """bfloat16 in and out: the queries are exact, so the error is that of the weights and of rounding the result."""
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    batch = make_batch(SHAPES["gqa4_128"], LENGTHS, COUNTS, torch.bfloat16)
    out = run_batch(batch, "bfloat16").double()
    answer = expected(batch, "bfloat16")
    scale = max(r.abs().max().item() for r in batch.rows)
    assert ((out - answer).abs() <= 2**-8 * answer.abs() + 2e-3 * scale).all()


@pytest.mark.parametrize("isa", _attn_cpu.supported_isas())
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_large_scores_do_not_overflow(isa, kv_dtype, monkeypatch):
    """Scores far apart and growing along the sequence: the reference exponent must follow."""
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    s = LayerShape(1, 16, 16, 2, 1.0)
    batch = make_batch(s, [700, 130], [1, 3])
    for rows in batch.rows:
        rows[:, s.q_columns :][:, :16] *= torch.linspace(0.1, 40, len(rows))[:, None]
        rows[:, : s.q_columns] = rows[:, : s.q_columns].bfloat16().float()
    error = (run_batch(batch, kv_dtype).double() - expected(batch, kv_dtype)).abs().max().item()
    assert error <= 4 * max(bound(isa, kv_dtype), 1e-4)


def test_equal_values_come_out_exactly():
    """Weights sum to one even where they are rounded."""
    s = SHAPES["gqa8_64"]
    batch = make_batch(s, [1000], [1])
    batch.rows[0][:, -s.v_dim :] = 1.0
    assert (run_batch(batch, "bfloat16") - 1).abs().max() < 1e-6


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", _attn_cpu.supported_isas())
def test_stored_values_are_rounded_to_nearest_even(isa, kv_dtype, monkeypatch):
    """One position: the output is the stored V itself, so every conversion can be checked bit by bit."""
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    s = LayerShape(1, 2, 512, 1, 1.0)
    batch = make_batch(s, [1], [1])
    g = torch.Generator().manual_seed(1)
    v = torch.randn(512, generator=g) * 10.0 ** torch.linspace(-9, 4, 512)
    v[:8] = torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2.0**-24, 65504.0])
    batch.rows[0][0, -512:] = v
    out = run_batch(batch, kv_dtype, poisoned=False)
    assert torch.equal(out[0], stored(v[:1], v, kv_dtype)[1].float())
