"""The tiers of an R-rank: what leaves a KV cache comes back to the bit, or is said to be lost."""

from __future__ import annotations

import errno
import gc
import threading
import time

import numpy as np
import pytest
import torch

from hpcdecode._attn_cpu import crc32c
from hpcdecode.attention import cuda
from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.swapped_blocks import blocks_of
from hpcdecode.attention.torch_rows import layer_bytes
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.kv_swap import KvSwap
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.shares import Share
from hpcdecode.schedule.plan import Plan
from hpcdecode.system.swap_tiers import FileTier, HostTier
from hpcdecode.system.timeline import Timeline
from tests.support.swapping import chunk_bytes

SHAPES = [
    LayerShape(kv_heads=2, k_dim=64, v_dim=32, q_heads=4, scale=0.3),
    LayerShape(kv_heads=4, k_dim=128, v_dim=128, q_heads=4, scale=0.1),
]
LATENT = [LayerShape(kv_heads=1, k_dim=96, v_dim=64, q_heads=4, scale=0.3, latent=True)]


class Faulty(HostTier):
    """Memory that fails as it is told.

    Attributes:
        fault: `write`, `read`, `bits`, or nothing.
    """

    fault = ""
    delay = 0.0

    def write(self, chunk, data):
        time.sleep(self.delay)
        if self.fault == "write":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(chunk, data)
        if self.fault == "bits":
            self._held[chunk][len(data) // 3] ^= 1

    def read(self, chunk, data):
        time.sleep(self.delay)
        if self.fault == "read":
            raise OSError(errno.EIO, "Input/output error")
        super().read(chunk, data)


def opened(kind="float32", shapes=SHAPES, capacity=8192, backend="attn_cpu"):
    sizes = {"kv_dtype": kind, "capacity_tokens": capacity, "max_sequences": 8, "block_tokens": 64}
    return open_kv_cache(shapes, **sizes, threads=2, backend=backend)


def filled(kv_cache, lengths):
    draw = np.random.default_rng(3)
    for slot, length in enumerate(lengths):
        kv_cache.extend([slot], [length])
        for layer, shape in enumerate(kv_cache.layers):
            kv_cache.append(
                layer, [slot], [length], draw.standard_normal((length, shape.kv_columns)).astype(np.float32)
            )


def attended(kv_cache, slot):
    """Return what a slot's next token attends to, which is taken back."""
    draw, outputs = np.random.default_rng(4), []
    kv_cache.extend([slot], [1])
    for layer, shape in enumerate(kv_cache.layers):
        rows = draw.standard_normal((1, shape.row_columns)).astype(np.float32)
        out = np.zeros((1, shape.out_columns), np.float32)
        kv_cache.attend(layer, [slot], [1], rows, out)
        outputs.append(out)
    kv_cache.truncate(slot, kv_cache.length(slot) - 1)
    return [out.tolist() for out in outputs]


def results(swap, lane, count):
    found = []
    while len(found) < count:
        found += swap.take_results(lane)
        time.sleep(1e-4)
    return sorted(found)


def tables(*rows):
    return np.array(rows, np.int32)


@pytest.mark.parametrize("backend", ["attn_cpu", "torch", "attn_cuda"])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [("float32", SHAPES), ("bfloat16", SHAPES), ("int8", SHAPES), ("int4", SHAPES), ("int8", LATENT)],
)
def test_what_comes_back_attends_to_the_same_bits(tmp_path, kind, shapes, backend):
    if backend == "attn_cuda" and shapes is LATENT:
        kind = "bfloat16"  # which its kernels have
    kv_cache = opened(kind, shapes, backend=backend)
    filled(kv_cache, [1, 64, 1500, 777])
    kv_cache.fork(2, 4)  # what is shared moves whole
    before = [attended(kv_cache, slot) for slot in (0, 1, 2, 3)]
    size = chunk_bytes(kv_cache)
    worker = AttentionWorker(
        kv_cache,
        [None] * 2,
        Timeline(),
        swap=KvSwap(kv_cache, [HostTier(size, size), FileTier(str(tmp_path), 40 * size, size)]),
    )
    slots = range(4)
    out = Plan(swap_out=tables(*((0, s, 10 + s) for s in slots)), release=tables(*((0, s) for s in (*slots, 4))))
    worker.apply(0, Share(out, 0))
    assert kv_cache.used_tokens == 0
    filled(kv_cache, [900])  # others take the blocks
    kv_cache.release([0])
    lengths = [1, 64, 1500, 777]
    worker.apply(0, Share(Plan(swap_in=tables(*((0, 7 - s, 10 + s, lengths[s]) for s in slots))), 0))
    worker.swap.check()
    assert results(worker.swap, 0, 4) == [(10 + s, True) for s in slots]
    assert [attended(kv_cache, 7 - slot) for slot in slots] == before
    worker.check()
    counts = worker.swap.counts
    assert counts.bytes_in == counts.bytes_out > 0 and counts.failures == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["write", "read", "bits"])
def test_what_is_lost_is_said_once_and_the_rest_comes_back(caplog, fault):
    kv_cache = opened()
    filled(kv_cache, [600, 600, 600])
    before, size = attended(kv_cache, 2), chunk_bytes(kv_cache)
    tier = Faulty(30 * size, size)
    swap = KvSwap(kv_cache, [tier])
    tier.fault = fault
    swap.out(0, 0, 1)
    swap.out(0, 1, 2)
    swap.wait()
    for slot, ticket in ((0, 1), (1, 2)):
        swap.bring(0, slot, ticket)
    assert results(swap, 0, 2) == [(1, False), (2, False)]
    tier.fault = ""
    swap.out(0, 2, 3)
    kv_cache.release([2])
    kv_cache.extend([2], [600])
    swap.bring(0, 2, 3)
    assert results(swap, 0, 1) == [(3, True)]
    assert attended(kv_cache, 2) == before
    swap.check()
    assert swap.counts.failures == 2 and not swap.take_results(0)
    assert len([r for r in caplog.records if "--kv-swap" in r.message]) == 1


def test_what_has_no_room_fails_when_it_is_wanted():
    kv_cache = opened()
    filled(kv_cache, [600, 600])
    size = chunk_bytes(kv_cache)
    swap = KvSwap(kv_cache, [HostTier(size, size)])
    swap.out(0, 0, 1)
    swap.out(0, 1, 2)
    swap.bring(0, 1, 2)
    assert results(swap, 0, 1) == [(2, False)]
    swap.forget(0)
    swap.check()
    assert swap.take_results(0) == []


def test_what_is_under_way_when_a_lane_ends_is_dropped():
    kv_cache = opened()
    filled(kv_cache, [2000, 2000, 600])
    size = chunk_bytes(kv_cache)
    tier = Faulty(30 * size, size)
    tier.delay = 0.02
    swap = KvSwap(kv_cache, [tier])
    swap.out(0, 0, 1)
    swap.out(0, 1, 2)
    swap.out(1, 2, 1)
    swap.bring(0, 0, 1)
    swap.forget(0)
    assert swap.take_results(0) == [(1, False)]
    kv_cache.release([0, 1])
    swap.bring(1, 2, 1)
    assert results(swap, 1, 1) == [(1, True)]
    swap.check()
    assert not swap._copies


def test_tickets_that_are_wrong_are_found():
    kv_cache = opened()
    filled(kv_cache, [600, 100])
    size = chunk_bytes(kv_cache)
    swap = KvSwap(kv_cache, [HostTier(9 * size, size)])
    swap.out(0, 0, 1)
    with pytest.raises(InvariantViolation, match="leaves once under a ticket"):
        swap.out(0, 0, 1)
    with pytest.raises(InvariantViolation, match="nothing left"):
        swap.bring(0, 0, 9)
    with pytest.raises(InvariantViolation, match="600 tokens left, 100 are to come"):
        swap.bring(0, 1, 1)
    swap._free[0].append(0)
    with pytest.raises(InvariantViolation, match="free or held once"):
        swap.check()
    with pytest.raises(InvariantViolation, match="tiers that there are"):
        AttentionWorker(kv_cache, [None], Timeline()).apply(0, Share(Plan(swap_out=tables((0, 0, 1))), 0))


def test_threads_end_with_what_uses_them(tmp_path):
    kv_cache = opened()
    size = chunk_bytes(kv_cache)
    filled(kv_cache, [600])
    swap = KvSwap(kv_cache, [FileTier(str(tmp_path), 9 * size, size)])
    swap.out(0, 0, 1)
    swap.wait()
    assert sum(t.name == "kv-swap" for t in threading.enumerate()) >= 2
    own = [t for t in threading.enumerate() if t.name == "kv-swap"]
    del swap
    gc.collect()
    for thread in own[-2:]:
        thread.join(5)
        assert not thread.is_alive()


def test_blocks_that_a_slot_does_not_hold_are_not_copied():
    native = opened().native
    native.extend([0], [100])
    block = np.zeros(native.block_bytes, np.uint8)
    assert native.copy_out(0, 1, block) == crc32c(block)
    for first, size in ((2, 1), (-1, 1), (0, 3)):
        with pytest.raises(ValueError, match="holds 2 blocks"):
            native.copy_in(0, first, np.zeros(size * native.block_bytes, np.uint8))
    with pytest.raises(ValueError, match="holds 2 blocks"):
        native.copy_out(0, 0, block[:-1].copy())
    with pytest.raises(ValueError, match="not open"):
        native.copy_out(1, 0, block)


@pytest.mark.parametrize("backend", ["torch", "attn_cuda"])
def test_blocks_of_a_cache_on_a_device_are_those_of_a_slot(backend):
    """On the device of hosts; and not those of caches that keep states beside K and V."""
    kv_cache = opened("k8v4", backend=backend)
    filled(kv_cache, [100, 200])
    blocks = blocks_of(HostKvCache(kv_cache, "cpu"))
    expected = 64 * sum(layer_bytes(shape, "k8v4") for shape in SHAPES)
    if backend == "attn_cuda":
        expected = cuda.block_bytes(SHAPES, "k8v4", 64, torch.device("cpu"))
    assert blocks.block_bytes == expected
    data = blocks.memory(2 * blocks.block_bytes)
    before = attended(kv_cache, 1)
    assert blocks.copy_out(1, 2, data)() == crc32c(data)
    kv_cache.release([0])
    kv_cache.extend([5], [256])
    blocks.copy_out(1, 0, other := blocks.memory(2 * blocks.block_bytes))()
    kv_cache.release([1])
    blocks.copy_in(5, 0, other)
    blocks.copy_in(5, 2, data)
    kv_cache.truncate(5, 200)
    assert attended(kv_cache, 5) == before
    for first, problem in ((3, "expected blocks 0 to 3, got 3 to 4"), (-1, "got -1 to 0")):
        with pytest.raises(ValueError, match=problem):
            blocks.copy_in(5, first, data)
    with pytest.raises(ValueError, match="expected a multiple of"):
        blocks.copy_out(5, 0, data[1:])
    with pytest.raises(InvariantViolation, match="whose blocks can be read"):
        KvSwap(HybridKvCache([SHAPES[0]], kv_cache, None, 64, 64, 64), [])
