"""KV caches whose sequences give up what leaves windows: the same results to the bit, and the blocks that they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode import _attn_cpu
from hpcdecode._attn_cpu import crc32c
from hpcdecode.attention.base import KvCapacityError, native_shapes
from hpcdecode.attention.footprint import ENDLESS, Footprint, largest, most_blocks
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token, capacity_for, footprint_for
from hpcdecode.attention.swapped_blocks import blocks_of

FULL = LayerShape(2, 16, 16, 4, 0.25)
SHORT = LayerShape(2, 16, 16, 4, 0.25, window=40)
LONG = LayerShape(1, 32, 16, 4, 0.25, window=150, softcap=20.0)
CHUNKED = LayerShape(2, 16, 16, 4, 0.25, window=128, chunked=True)
LATENT = LayerShape(1, 32, 16, 4, 0.25, window=64, latent=True)
MODELS = {
    "alternating": [SHORT, FULL] * 3,
    "mostly short": [SHORT, SHORT, SHORT, FULL, SHORT],
    "all kinds": [FULL, SHORT, LONG, CHUNKED, SHORT, LATENT],
    "no full layer": [SHORT, SHORT],
}
SLOTS = 6


BACKENDS = ("attn_cpu", "attn_cuda")


def opened(layers, windowed, block_tokens=64, tokens=8192, kv_dtype="bfloat16", backend="attn_cpu", lookahead=0):
    sizes = {"capacity_tokens": tokens, "max_sequences": SLOTS, "block_tokens": block_tokens, "backend": backend}
    windows = {"windowed": windowed, "lookahead": lookahead}
    return open_kv_cache(layers, kv_dtype=kv_dtype, threads=2, **windows, **sizes)


class Both:
    """A cache that drops what leaves windows, and one that keeps all, which are told the same."""

    def __init__(self, layers, **options):
        self.layers = layers
        self.caches = [opened(layers, windowed, **options) for windowed in (False, True)]
        self.rng = np.random.default_rng(0)

    def rows(self, tokens, columns):
        return torch.from_numpy(self.rng.standard_normal((tokens, columns), np.float32))

    def tell(self, verb, *arguments):
        for cache in self.caches:
            getattr(cache, verb)(*arguments)

    def append(self, slots, counts):
        self.tell("extend", slots, counts)
        for layer, shape in enumerate(self.layers):
            self.tell("append", layer, slots, counts, self.rows(int(counts.sum()), shape.kv_columns))

    def attend(self, slots, counts=None):
        counts = np.ones(len(slots), np.int32) if counts is None else counts
        self.tell("extend", slots, counts)
        for layer, shape in enumerate(self.layers):
            qkv = self.rows(counts.sum(), shape.row_columns)
            outs = [torch.empty(counts.sum(), shape.out_columns) for _ in self.caches]
            for cache, out in zip(self.caches, outs, strict=True):
                cache.attend(layer, slots, counts, qkv, out)
            assert torch.equal(*outs), f"layer {layer}"
        self.check()

    def check(self):
        whole, dropping = self.caches
        dropping.check()
        assert dropping.used_tokens <= whole.used_tokens


def ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("lookahead", [0, 16])
@pytest.mark.parametrize(
    ("backend", "block_tokens", "steps"),
    [*(("attn_cpu", tokens, 60) for tokens in (64, 128, 16, 24, 5)), ("attn_cuda", 64, 24), ("attn_cuda", 24, 24)],
)
@pytest.mark.parametrize("model", MODELS)
def test_results_are_those_of_a_cache_that_keeps_all(model, backend, block_tokens, steps, lookahead):
    """With tokens ahead of which some are dropped again, and with one at a time."""
    options = {"block_tokens": block_tokens, "backend": backend, "lookahead": lookahead}
    both, open_slots, rng = Both(MODELS[model], **options), {}, np.random.default_rng(1)
    for _ in range(steps):
        draw = rng.random()
        free = [slot for slot in range(SLOTS) if slot not in open_slots]
        if free and draw < 0.3:
            counts = int(rng.integers(1, 400))
            both.append(ints(free[0]), ints(counts))
            open_slots[free[0]] = counts
        elif free and open_slots and draw < 0.4:
            source = int(rng.choice(list(open_slots)))
            both.tell("fork", source, free[0])
            open_slots[free[0]] = open_slots[source]
        elif open_slots and draw < 0.5:
            slot = int(rng.choice(list(open_slots)))
            both.tell("release", ints(slot))
            del open_slots[slot]
        elif open_slots and draw < 0.7:  # some together, of which several may share their last blocks
            some = sorted(open_slots)[: int(rng.integers(1, 3))]
            counts = [int(rng.integers(1, 120)) for _ in some]
            both.append(ints(*some), ints(*counts))
            for slot, count in zip(some, counts, strict=True):
                open_slots[slot] += count
        elif open_slots:
            counts = rng.integers(1, lookahead + 2, len(open_slots)).astype(np.int32)
            both.attend(ints(*open_slots), counts)
            for slot, count in zip(open_slots, counts.tolist(), strict=True):
                open_slots[slot] += int(rng.integers(1, count + 1))
                both.tell("truncate", slot, open_slots[slot])
        both.check()
        assert all(both.caches[1].length(slot) == length for slot, length in open_slots.items())
    both.tell("release", ints(*open_slots))
    assert both.caches[1].used_tokens == 0


@pytest.mark.parametrize(("backend", "steps"), [("attn_cpu", 70), ("attn_cuda", 4)])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8", "k8v4", "int4"])
def test_every_type_keeps_windows_alike(kv_dtype, backend, steps):
    both = Both(MODELS["alternating"], kv_dtype=kv_dtype, backend=backend)
    both.append(ints(0, 3), ints(130, 33))
    for _ in range(steps):
        both.attend(ints(0, 3))


@pytest.mark.parametrize("lookahead", [0, 16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_tokens", [64, 16, 24])
@pytest.mark.parametrize("model", MODELS)
def test_a_sequence_takes_no_more_than_its_footprint(model, block_tokens, backend, lookahead):
    layers = MODELS[model]
    footprint = footprint_for(layers, "bfloat16", block_tokens, 0, True, backend == "attn_cuda", lookahead)
    cache, most = opened(layers, True, block_tokens, 1000, backend=backend, lookahead=lookahead), 0
    held, seen = blocks_of(cache).held_blocks, 0
    for length in range(1, 700):
        cache.extend(ints(0), ints(1))
        most = max(most, held(0))
        assert most * block_tokens <= footprint.tokens(length)
        seen += most * block_tokens == footprint.tokens(length)
    assert seen > 350 or block_tokens != 64  # it is no loose bound
    assert cache.used_tokens == -(-held(0) * block_tokens // footprint.groups)


def test_capacity_is_used_to_the_last_block():
    layers = [SHORT, SHORT, SHORT, FULL]
    footprint = footprint_for(layers, "bfloat16", 64, 0, windowed=True)
    assert (footprint.whole, footprint.windows, footprint.groups) == (1, ((3, 2),), 4)
    assert footprint.tokens(650) == 704 + 3 * 128
    cache = opened(layers, True, tokens=1088)  # 68 blocks of any group
    cache.extend(ints(0, 1, 2, 3), ints(650, 650, 650, 650))
    assert cache.free_blocks == 0 and cache.used_tokens == cache.capacity_tokens == 1088
    assert cache.native.held_blocks(0) == 17
    with pytest.raises(KvCapacityError, match="KV cache full: 64 tokens needed, 0 free of 1088"):
        cache.extend(ints(4), ints(64))
    with pytest.raises(KvCapacityError):  # what leaves windows meanwhile comes back
        cache.extend(ints(0, 4), ints(30, 200))
    cache.check()
    assert (cache.length(0), cache.native.held_blocks(0)) == (650, 17)
    cache.extend(ints(0), ints(30))  # what leaves windows makes room
    assert cache.native.held_blocks(0) == 14
    cache.extend(ints(1), ints(55))
    cache.check()


def test_sizes_count_groups_of_equal_blocks():
    layers = [SHORT] * 10 + [FULL] * 2
    assert capacity_for(layers, "bfloat16", 1 << 20, 64, windowed=True) == capacity_for(layers, "bfloat16", 1 << 20, 64)
    size, groups = _attn_cpu.layer_groups(native_shapes(layers, _attn_cpu.LayerShape), "bfloat16", 64)
    assert size == 2 * 2 * 64 * 2 * 16 * 2 and groups == [(40, False)] * 5 + [(0, False)]
    wide = LayerShape(2, 32, 32, 4, 0.25)  # twice the bytes: one of them beside two short ones
    size, groups = _attn_cpu.layer_groups(native_shapes([SHORT] * 4 + [wide], _attn_cpu.LayerShape), "bfloat16", 64)
    assert len(groups) == 3 and bytes_per_token([SHORT] * 4 + [wide], "bfloat16", 64, windowed=True) == size * 3 / 64


@pytest.mark.parametrize("dropped", [0, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_all_groups_move_to_memory_and_back(backend, dropped):
    """Also of a slot that was longer, so that it holds fewer than its length says."""
    layers = MODELS["all kinds"]
    cache, other = (opened(layers, True, backend=backend, lookahead=8) for _ in range(2))
    own, others = blocks_of(cache), blocks_of(other)
    rng = np.random.default_rng(0)
    if dropped:
        cache.extend(ints(1), ints(367 + dropped))
        cache.truncate(1, 367)
    else:
        cache.extend(ints(1), ints(367))
    for layer, shape in enumerate(layers):
        kv = torch.from_numpy(rng.standard_normal((367, shape.kv_columns), np.float32))
        cache.append(layer, ints(1), ints(367), kv)
    blocks = own.held_blocks(1)
    assert cache.used_tokens < -(-blocks * 64 // 6) or not dropped
    moved = np.empty(blocks * own.block_bytes, np.uint8)
    assert own.copy_out(1, 0, moved)() == crc32c(moved)
    other.extend(ints(4), ints(367))
    assert others.held_blocks(4) == blocks
    half = blocks // 2 * own.block_bytes
    others.copy_in(4, 0, moved[:half])
    others.copy_in(4, blocks // 2, moved[half:])
    for layer, shape in enumerate(layers):
        qkv = torch.from_numpy(rng.standard_normal((1, shape.row_columns), np.float32))
        outs = [torch.empty(1, shape.out_columns) for _ in range(2)]
        if layer == 0:
            cache.extend(ints(1), ints(1))
            other.extend(ints(4), ints(1))
        cache.attend(layer, ints(1), ints(1), qkv, outs[0])
        other.attend(layer, ints(4), ints(1), qkv, outs[1])
        assert torch.equal(*outs)
    with pytest.raises(ValueError, match="slot 1"):
        own.copy_out(1, blocks, moved[: own.block_bytes])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_needs_dropped_tokens_is_refused(backend):
    cache = opened([SHORT, FULL], True, backend=backend)
    cache.extend(ints(0), ints(300))
    qkv, out = torch.zeros(100, SHORT.row_columns), torch.zeros(100, SHORT.out_columns)
    with pytest.raises(ValueError, match="its last 100 positions see some that have left the window"):
        cache.attend(0, ints(0), ints(100), qkv, out)
    cache.attend(1, ints(0), ints(100), qkv, out)  # a layer that keeps all
    with pytest.raises(ValueError, match="cannot truncate length 300 to 100, as tokens before its window are gone"):
        cache.truncate(0, 100)
    cache.truncate(0, 299)
    cache.check()
    ahead = opened([SHORT, FULL], True, backend=backend, lookahead=20)
    ahead.extend(ints(0), ints(300))
    ahead.attend(0, ints(0), ints(21), qkv[:21], out[:21])
    ahead.truncate(0, 280)
    with pytest.raises(ValueError, match="cannot truncate length 280 to 100"):
        ahead.truncate(0, 100)
    ahead.check()
    with pytest.raises(ValueError, match="without frames"):
        _attn_cpu.KvCache(
            native_shapes([SHORT], _attn_cpu.LayerShape), "float32", 64, 1, 64, 1, [], "", [], False, 1, 1, True
        )


def test_footprints_of_several_ranks():
    few, many = Footprint(64, 0, 1, ((1, 2),)), Footprint(64, 0, 1, ((3, 2),))
    assert largest([many, few]) is few and few.held(1280) == (1280 + 128) / 2
    longer = Footprint(64, 0, 1, ((3, 9),))
    assert few.longest(1280) == 2 * 1280 - 128 and few.held(few.longest(1280)) == 1280
    assert few.longest(60) == 60 and Footprint(64, 5).longest(640) == 640
    assert Footprint(64, 0, 0, ((2, 3),)).longest(192) == ENDLESS
    assert largest([few, longer]) == Footprint(64)  # either takes more, at some length
    assert largest([Footprint(64), few]) == Footprint(64)
    lengths = np.array([1, 64, 65, 1000])
    assert many.tokens(lengths).tolist() == [many.tokens(int(n)) for n in lengths] == [256, 256, 512, 1024 + 3 * 128]
    assert many.tokens(1000, 640) == 384 + 3 * 128 and many.tokens(700, 640) == 64 + 3 * 64
    assert many.of_blocks(640) == 640 + 3 * 128
    assert most_blocks(128, True, 64) == 2 and most_blocks(128, False, 64) == 3 and most_blocks(1, False, 64) == 1
