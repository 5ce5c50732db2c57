"""K and V as whole numbers: what rounding costs, how many bytes they take, and that a sequence has its own results."""

import pytest
import torch

from hpcdecode import _attn_cpu
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.quantized import CODES, restored, rotated, rotation_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token, capacity_for
from hpcdecode.engine.prefill import StoredPrompts
from tests.support.attention_cases import expected, make_batch, run_batch

SHAPE = LayerShape(2, 48, 80, 6, 0.15)


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, SHAPE.row_columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dim", "rotation"), [(1, 1), (7, 1), (96, 32), (128, 128), (256, 256), (576, 64), (1024, 256)]
)
def test_rotations_keep_products(dim, rotation):
    x, y = torch.randn(2, 5, dim, dtype=torch.float64)
    assert rotation_of(dim) == rotation
    torch.testing.assert_close(rotated(rotated(x)), x * rotation)
    torch.testing.assert_close((rotated(x) * rotated(y)).sum(-1), (x * y).sum(-1) * rotation)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_a_large_element_does_not_coarsen_a_row(kv_dtype):
    """Without the rotation the step would be the large element over the levels, and small elements would be lost."""
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    x[0, 5] = 40.0
    for codes in CODES[kv_dtype]:
        error = (restored(x, codes) - x).square().mean().sqrt()
        step = 2 * 40.0 / (codes.high - codes.low)
        assert error < step / 12**0.5 / 2


def test_rows_that_are_constant_or_zero():
    for codes in {codes for both in CODES.values() for codes in both}:
        assert torch.equal(restored(torch.zeros(2, 64), codes), torch.zeros(2, 64))
        torch.testing.assert_close(
            restored(torch.full((2, 64), 3.0), codes), torch.full((2, 64), 3.0), rtol=4e-3, atol=0
        )


def test_bytes_and_capacity():
    """K and V of 128 dims: bits of an element, and two bytes a scale or middle."""
    layers = [LayerShape(4, 128, 128, 4, 1.0)]
    sizes = {"int8": 128 + 128 + 4, "k8v4": 128 + 64 + 6, "int4": 96 + 64 + 8}
    assert {name: bytes_per_token(layers, name) / 4 for name in CODES} == sizes
    for name, size in sizes.items():
        assert capacity_for(layers, name, 10 * 64 * 4 * size + 1) == 640
        kv_cache = open_kv_cache(layers, kv_dtype=name, capacity_tokens=640, max_sequences=1)
        assert kv_cache.bytes >= 640 * 4 * size


def decode(kv_cache, slots, qkv) -> torch.Tensor:
    out = torch.empty(len(slots), SHAPE.out_columns)
    kv_cache.extend(slots, [1] * len(slots))
    kv_cache.attend(0, slots, [1] * len(slots), qkv, out)
    return out


@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize("block_tokens", [16, 24, 64])
def test_forks_and_truncated_sequences_are_as_if_alone(kv_dtype, block_tokens):
    """A fork within a block, and a sequence that takes back tokens, go on as one that never shared anything."""
    tokens, options = 75, {"capacity_tokens": 1024, "max_sequences": 3, "block_tokens": block_tokens}
    common, own, other = rows(tokens), rows(10, 1), rows(10, 2)

    def filled():
        kv_cache = open_kv_cache([SHAPE], kv_dtype=kv_dtype, **options)
        kv_cache.extend([0], [tokens])
        kv_cache.append(0, [0], [tokens], common[:, SHAPE.q_columns :].contiguous())
        return kv_cache

    alone = filled()
    wanted = torch.cat([decode(alone, [0], own[i : i + 1]) for i in range(10)])
    shared = filled()
    shared.fork(0, 2)
    pairs = [decode(shared, [2, 0], torch.stack((own[i], other[i]))) for i in range(10)]
    shared.check()
    assert torch.equal(torch.stack([pair[0] for pair in pairs]), wanted)
    assert not torch.equal(torch.stack([pair[1] for pair in pairs]), wanted)
    shared.truncate(0, tokens)
    assert torch.equal(torch.cat([decode(shared, [0], own[i : i + 1]) for i in range(10)]), wanted)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_prompts_see_what_decoding_sees(kv_dtype):
    """Attention of a prompt over values as they are stored, against the cache itself: other kernels, same numbers."""
    tokens = 140
    qkv = rows(tokens)
    kv_cache = open_kv_cache([SHAPE], kv_dtype=kv_dtype, capacity_tokens=tokens, max_sequences=1, backend="reference")
    wanted = torch.empty(tokens, SHAPE.out_columns)
    kv_cache.extend([0], [tokens])
    kv_cache.attend(0, [0], [tokens], qkv, wanted)
    prompts = StoredPrompts(CpuPromptAttention([SHAPE], dtype="float32"), [SHAPE], kv_dtype)
    q, k, v = qkv.split([SHAPE.q_columns, 2 * SHAPE.k_dim, 2 * SHAPE.v_dim], 1)
    packed, out = torch.empty(prompts.packed_bytes(0, tokens), dtype=torch.uint8), torch.empty_like(wanted)
    for first, count in ((0, 70), (70, 1), (71, 69)):
        part = slice(first, first + count)
        prompts.attend(0, [packed], [first], [count], *(x[part].contiguous() for x in (q, k, v)), out[part])
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", _attn_cpu.supported_isas())
def test_shared_columns_of_latents_have_a_scale_of_their_own(isa, monkeypatch):
    """Columns that are 50 times larger than the latent do not cost it its bits."""
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    s = LayerShape(1, 80, 64, 20, 0.1, latent=True)
    batch = make_batch(s, [300], [1])
    for rows in batch.rows:
        rows[:, s.q_columns + s.v_dim :] *= 50
        rows[:, : s.q_columns].view(len(rows), s.q_heads, s.k_dim)[:, :, s.v_dim :] /= 50
    exact, kept = expected(batch, "float32"), expected(batch, "int8")
    assert (kept - exact).abs().max() < 0.02
    assert (run_batch(batch, "int8") - kept).abs().max() < 1e-3
    assert bytes_per_token([s], "int8") == 80 + 2 * 2
