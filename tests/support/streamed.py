"""A KV cache larger than its memory beside one that has all in memory."""

from __future__ import annotations

import numpy as np
import torch

from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.rotating import RotatingKvCache
from hpcdecode.attention.shapes import LayerShape
from tests.support.rotating import BLOCK_TOKENS

SHAPES = [
    LayerShape(kv_heads=2, k_dim=64, v_dim=32, q_heads=4, scale=0.3),
    LayerShape(kv_heads=4, k_dim=64, v_dim=64, q_heads=4, scale=0.1, window=70),
    LayerShape(kv_heads=2, k_dim=64, v_dim=32, q_heads=4, scale=0.3, sinks=True),
]
SLOTS = 16


class CachePair:
    """Does the same to two KV caches, and compares what they give.

    Args:
        streamed: KV cache that is larger than its memory.
        kv_dtype: Data type of K and V.
        dtype: Of rows.
        plain: How to open the other one.
    """

    def __init__(
        self, streamed: RotatingKvCache, kv_dtype: str, dtype: torch.dtype = torch.float32, seed: int = 0, **plain
    ) -> None:
        sizes = {"kv_dtype": kv_dtype, "capacity_tokens": streamed.capacity_tokens, "block_tokens": BLOCK_TOKENS}
        plain = open_kv_cache(streamed.layers, **sizes, max_sequences=SLOTS, **(plain or {"threads": 2}))
        self.caches, self.device = (plain, streamed), getattr(streamed, "device", "cpu")
        self.draw, self.dtype, self.held = np.random.default_rng(seed), dtype, {}

    def _rows(self, tokens, columns):
        rows = torch.from_numpy(self.draw.standard_normal((tokens, columns), np.float32))
        return rows.to(self.device, self.dtype)

    def step(self, counts, appended=()):
        """Attend to so many new tokens by slot, after those of `appended` slots are only appended."""
        for cache in self.caches:
            for some in (counts, dict(appended)):
                if some:
                    cache.extend(list(some), list(some.values()))
        for some in (counts, dict(appended)):
            for slot, count in some.items():
                self.held[slot] = self.held.get(slot, 0) + count
        for layer, shape in enumerate(self.caches[0].layers):
            for slot, count in dict(appended).items():
                kv = self._rows(count, shape.kv_columns)
                for cache in self.caches:
                    cache.append(layer, [slot], [count], kv)
            if counts:
                self.attend(layer, shape, counts)

    def attend(self, layer, shape, counts):
        slots = list(counts)
        self.draw.shuffle(slots)
        tokens = [counts[slot] for slot in slots]
        qkv = self._rows(sum(tokens), shape.row_columns)
        sinks = torch.linspace(-1, 1, shape.q_heads) if shape.sinks else None
        like = {"dtype": self.dtype, "device": self.device}
        outs = [torch.full((sum(tokens), shape.out_columns), torch.nan, **like) for _ in self.caches]
        for cache, out in zip(self.caches, outs, strict=True):
            cache.attend(layer, slots, np.array(tokens, np.int32), qkv, out, sinks)
        self.compare(outs)

    def compare(self, outs):
        assert torch.equal(*outs) and not outs[0].isnan().any()

    def release(self, *slots):
        for cache in self.caches:
            cache.release(list(slots))
        for slot in slots:
            del self.held[slot]

    def fork(self, src, dst):
        for cache in self.caches:
            cache.fork(src, dst)
        self.held[dst] = self.held[src]

    def truncate(self, slot, length):
        for cache in self.caches:
            cache.truncate(slot, length)
        self.held[slot] = length

    def random_step(self):
        """Do something drawn to some slots, and let most of the others decode."""
        free = [slot for slot in range(SLOTS) if slot not in self.held]
        room = min(cache.free_blocks for cache in self.caches) - 2 * SLOTS
        if self.held and (self.draw.random() < 0.2 or room < 4):
            self.release(*self.draw.permutation(list(self.held))[: 1 + (room < 4) * 4].tolist())
        elif self.held and free and self.draw.random() < 0.3:
            self.fork(int(self.draw.choice(list(self.held))), free.pop(0))
        elif self.held and self.draw.random() < 0.2:
            slot = int(self.draw.choice(list(self.held)))
            self.truncate(slot, int(self.draw.integers(1, self.held[slot] + 1)))
        long = min(300, room * BLOCK_TOKENS // 2)
        appended = {free[0]: int(self.draw.integers(1, long))} if free and long > 1 else {}
        decode = {slot: 1 for slot in self.held if self.draw.random() < 0.9}
        if decode and self.draw.random() < 0.3:
            decode[next(iter(decode))] = 3
        self.step(decode, appended)
        for cache in self.caches:
            cache.check()
