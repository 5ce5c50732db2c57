"""What is opened on a GPU: kernels where there are some, else torch's operations, within the bytes that are given."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention import open as attention_open
from hpcdecode.attention.base import KvCapacityError
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.open import by_kernels, device_capacity, open_layers, open_on_device, torch_bytes
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, attention_shapes, recurrent_shapes
from hpcdecode.attention.sizes import ENDLESS_BLOCK, state_tokens_for
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.bench.stateful_layers import random_numbers, random_rows

CPU = torch.device("cpu")
HEADS = LayerShape(2, 32, 32, 4, 0.2)
WINDOW = replace(HEADS, window=100)
LATENT = LayerShape(1, 48, 32, 4, 0.2, latent=True)
STATE = RecurrentShape(4, 2, 16, 24, 4, has_beta=True)
MODELS = {
    "heads": ([HEADS] * 2, "bfloat16", "attn_cuda"),
    "heads, k8v4": ([HEADS] * 2, "k8v4", "attn_cuda"),
    "heads, int4": ([HEADS] * 2, "int4", "attn_cuda"),
    "wide V": ([replace(HEADS, v_dim=512)], "float32", "torch"),
    "wide V, int4": ([replace(HEADS, v_dim=512)], "int4", "torch"),
    "latents": ([LATENT, LATENT], "bfloat16", "attn_cuda"),
    "latents, int8": ([LATENT, LATENT], "int8", "torch"),
    "wide latents": ([replace(LATENT, k_dim=1600)], "float32", "torch"),
    "latents and heads": ([LATENT, HEADS], "bfloat16", "attn_cuda"),
    "heads and states": ([STATE, HEADS, STATE], "float32", "attn_cuda"),
    "latents and states": ([STATE, LATENT], "float32", "attn_cuda"),
    "windows": ([WINDOW, WINDOW, HEADS], "bfloat16", "attn_cuda"),
    "windows and states": ([STATE, WINDOW, HEADS, STATE], "float32", "attn_cuda"),
    "windows, wide V": ([replace(WINDOW, v_dim=512), HEADS], "float32", "torch"),
    "states": ([STATE, STATE], "float32", None),
}


def opened(layers, kv_dtype, nbytes, slots=4, host_tensors=False):
    attends = any(isinstance(shape, LayerShape) for shape in layers)
    block_tokens = 64 if attends else ENDLESS_BLOCK
    state_tokens = state_tokens_for(layers, kv_dtype, block_tokens)
    windowed = attends and by_kernels(attention_shapes(layers), kv_dtype)
    tokens = device_capacity(layers, kv_dtype, nbytes, block_tokens, state_tokens, CPU, windowed)
    return open_on_device(
        layers,
        [random_numbers(shape) for shape in recurrent_shapes(layers)],
        kv_dtype=kv_dtype,
        capacity_tokens=tokens,
        max_sequences=slots,
        block_tokens=block_tokens,
        state_tokens=state_tokens,
        device=CPU,
        host_tensors=host_tensors,
        windowed=windowed,
    )


@pytest.mark.parametrize("name", MODELS)
def test_what_is_opened_takes_no_more_than_is_given(name):
    layers, kv_dtype, backend = MODELS[name]
    cache = opened(layers, kv_dtype, 1 << 20, slots=1000)
    states = recurrent_shapes(layers)
    assert isinstance(cache, HybridKvCache) == bool(states)
    kv_cache = cache.kv_cache if states else cache
    classes = {"attn_cuda": CudaKvCache, "torch": TorchKvCache, None: type(None)}
    assert type(kv_cache) is classes[backend]
    assert by_kernels([s for s in layers if isinstance(s, LayerShape)], kv_dtype) == (backend != "torch")
    assert torch_bytes(layers, kv_dtype, CPU) == (backend != "attn_cuda")
    taken = kv_cache.bytes if kv_cache else 0
    for i in range(1000 if states else 0):  # until they are full
        try:
            cache.extend([i], [1])
        except KvCapacityError:
            break
    taken += (cache.states.open_slots * sum(s.state_bytes for s in states)) if states else 0
    assert 0.6 * (1 << 20) < taken <= 1 << 20
    cache.check()


@pytest.mark.parametrize("kernels", [True, False])
def test_a_hybrid_through_host_memory_gives_what_that_of_cpus_gives(kernels, monkeypatch):
    monkeypatch.setattr(attention_open, "by_kernels", lambda *_: kernels)
    layers = [STATE, LATENT, HEADS]
    device = opened(layers, "float32", 1 << 20, host_tensors=True)
    assert isinstance(device, HostKvCache)
    cpus = open_layers(layers, [random_numbers(STATE)], kv_dtype="float32", capacity_tokens=1 << 14, max_sequences=4)
    g = torch.Generator().manual_seed(0)
    for counts in ([9, 3], [1, 1]):
        for cache in (device, cpus):
            cache.extend([2, 0], counts)
        for i, shape in enumerate(layers):
            n = sum(counts)
            own = (
                random_rows(shape, n, torch.float32)
                if shape is STATE
                else torch.randn(n, shape.row_columns, generator=g)
            )
            outs = [torch.full((n, shape.out_columns), float("nan")) for _ in range(2)]
            for cache, out in zip((device, cpus), outs, strict=True):
                cache.attend(i, [2, 0], counts, own, out)
            assert (outs[0] - outs[1]).abs().max() <= 1e-5 * max(outs[1].abs().max(), 1)
        for cache in (device, cpus):
            cache.fork(2, 3)
            cache.release([3])
            cache.check()
    assert device.length(2) == 10 and device.bytes_read > 0 and device.attend_seconds > 0
