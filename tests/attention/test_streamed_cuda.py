"""A KV cache on a GPU that is larger than its memory gives the bits of one that has all in memory.

The GPU is emulated. To show that copies come behind what it was told, it may be late: then it does what it was told
when a copy comes behind that, or when its results are needed.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hpcdecode.attention import frame_copies
from hpcdecode.attention.cuda import KV_DTYPES
from hpcdecode.attention.frame_copies import HostFrames
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.streamed_cuda import StreamedCudaKvCache
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import HostTier
from hpcdecode.system.throttled_tier import ThrottledTier
from tests.support.rotating import BLOCK_TOKENS, file, host, sizes_of
from tests.support.streamed import SHAPES, SLOTS, CachePair

LATENT = [LayerShape(kv_heads=1, k_dim=96, v_dim=64, q_heads=4, scale=0.1, latent=True)] * 3


class LateCache(StreamedCudaKvCache):
    """One on a device that is late.

    Attributes:
        late: What it was told and has not done.
    """

    def __init__(self, *args, **options):
        self.late, self.done_late = deque(), 0
        super().__init__(*args, **options)
        frames = self._frames
        for name in ("out", "into"):
            setattr(frames, name, self._behind(getattr(frames, name)))
        frames.told = self._mark
        self._marked = 0  # of what was told, by number

    def _mark(self):
        with self.pages._changed:
            self._marked = self.done_late + len(self.late)

    def _behind(self, copy):
        def behind(*args):
            with self.pages._changed:  # one thread at a time does what is late
                while self.done_late < self._marked:
                    self._do()
            copy(*args)

        return behind

    def _do(self):
        self.late.popleft()()
        self.done_late += 1

    def finish(self):
        with self.pages._changed:
            while self.late:
                self._do()

    def _place(self, layer):
        self._placed = self.pages.frames(layer)

    def _tell(self, work):
        placed = list(self._placed)

        def do():
            self.native.place_pages(placed)
            work()

        self.late.append(do)

    def _append(self, layer, kv, slots, counts, tokens):
        whole = super()._append
        self._tell(lambda: whole(layer, kv, slots, counts, tokens))

    def _attend(self, layer, qkv, out, sinks, slots, counts, tokens):
        whole = super()._attend
        self._tell(lambda: whole(layer, qkv, out, sinks, slots, counts, tokens))

    def _copy_block(self, source, target):
        to, of = self._block(target), self._block(source)
        self.late.append(lambda: to.copy_(of))


class LatePair(CachePair):
    """Compares results at the end of a step: the block table of the emulation is that of its newest call."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.results = []

    def compare(self, outs):
        self.results.append(outs)

    def step(self, counts, appended=()):
        super().step(counts, appended)
        self.caches[1].finish()
        results, self.results = self.results, []
        for outs in results:
            super().compare(outs)


def rotating(shapes, kv_dtype, sizes, tiers, kind=StreamedCudaKvCache):
    return kind(shapes, kv_dtype, sizes, tiers, SLOTS, BLOCK_TOKENS, "cpu")


def pair_of(cache, kv_dtype, kind=CachePair, **options):
    dtype = torch.bfloat16 if kv_dtype == "bfloat16" else torch.float32
    return kind(cache, kv_dtype, dtype, backend="attn_cuda", device="cpu", **options)


def throttled(sizes):
    return [ThrottledTier(tier, 1 << 40) for tier in host(sizes)]


@pytest.mark.parametrize(("kv_dtype", "tiers"), [*((dtype, host) for dtype in KV_DTYPES), ("int8", throttled)])
def test_rows_are_those_of_a_cache_in_memory(kv_dtype, tiers):
    sizes = sizes_of(SHAPES, kv_dtype, ranges=12, frames=18, blocks=6, device=True)
    cache = rotating(SHAPES, kv_dtype, sizes, tiers(sizes))
    pair = pair_of(cache, kv_dtype)
    for _ in range(20):
        pair.random_step()
    counts = cache.pages.counts
    assert counts.bytes_in > sizes.frames * sizes.page_bytes and counts.bytes_out > 0
    pair.release(*pair.held)
    pair.caches[1].check()
    assert cache.used_tokens == 0


def test_latents_in_a_file(tmp_path):
    sizes = sizes_of(LATENT, "bfloat16", ranges=12, frames=18, blocks=6, device=True)
    pair = pair_of(rotating(LATENT, "bfloat16", sizes, file(sizes, tmp_path)), "bfloat16", seed=1)
    for _ in range(15):
        pair.random_step()
    assert pair.caches[1].pages.counts.bytes_in > 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(3))
def test_copies_come_behind_what_a_late_device_was_told(seed):
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=17, blocks=6, device=True)
    cache = rotating(SHAPES, "float32", sizes, host(sizes), LateCache)
    pair = pair_of(cache, "float32", LatePair, seed=seed)
    for _ in range(20):
        pair.random_step()
    assert cache.pages.counts.bytes_in > sizes.frames * sizes.page_bytes and cache.done_late > 60


def test_a_tier_that_gives_other_bits_is_named():
    class Flipping(HostTier):
        def memory(self, chunk):
            memory = super().memory(chunk)
            memory[len(memory) // 3] ^= 1
            return memory

    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=17, blocks=2, device=True)
    cache = rotating(SHAPES, "float32", sizes, host(sizes, Flipping))
    with pytest.raises(UserError, match=r"cannot be moved: what was read is not what was written"):
        for _ in range(30):
            cache.extend([*range(8)], [60] * 8) if not cache.used_tokens else cache.extend([*range(8)], [1] * 8)
            count = 60 if cache.length(0) == 60 else 1
            for layer, shape in enumerate(SHAPES):
                cache.append(layer, [*range(8)], [count] * 8, torch.zeros(8 * count, shape.kv_columns))


class NotedCuda:
    """Stands for `torch.cuda`, and notes in order what is told to streams and events."""

    def __init__(self):
        self.calls, outer = [], self

        class Event:
            def __init__(self):
                self.number = 0

            def record(self, stream=None):
                outer.calls.append(("record", self, stream or outer.on))

            def synchronize(self):
                outer.calls.append(("synchronize", self))

        class Stream:
            def __init__(self, _device=None):
                pass

            def wait_event(self, event):
                outer.calls.append(("wait", event, self))

        self.Event, self.Stream, self.on, self._computing = Event, Stream, None, Stream()

    def current_stream(self, _device=None):
        return self._computing

    @contextmanager
    def stream(self, stream):
        self.on = stream
        yield
        self.calls.append(("copies", stream))
        self.on = None


def test_a_gpu_copies_behind_what_it_was_told_and_is_waited_for(monkeypatch):
    noted = NotedCuda()
    monkeypatch.setattr(frame_copies.torch, "cuda", noted)
    monkeypatch.setattr(frame_copies, "use_gpu", lambda _: None)
    frames = torch.arange(32, dtype=torch.uint8).view(2, 16)
    copies = frame_copies.CudaFrames(frames)
    copies.told()
    ((_, first, computing), (_, second, _)) = noted.calls
    assert first is not second and computing is noted.current_stream()
    noted.calls.clear()
    memory = np.zeros(16, np.uint8)
    for copy, frame in ((copies.out, 1), (copies.into, 0)):
        copy(frame, [(4, 8), (12, 16)], memory)
        wait, record, told, waited = noted.calls
        stream = wait[2]
        assert wait == ("wait", second, stream) and stream is not computing
        assert record[0] == "record" and record[2] is stream and told == ("copies", stream)
        assert waited == ("synchronize", record[1])
        noted.calls.clear()
    assert memory.tolist() == [0] * 4 + [20, 21, 22, 23] + [0] * 4 + [28, 29, 30, 31]
    assert frames[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31]


def test_pinned_memory_is_taken_in_pieces(monkeypatch):
    made = []

    def empty(size, dtype, pin_memory=False):
        made.append(size)
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(frame_copies.torch, "empty", empty)
    monkeypatch.setattr(frame_copies, "use_gpu", made.append)
    memory = frame_copies.PinnedMemory("gpu")
    pieces = [memory.take(100 << 20) for _ in range(3)]
    assert made == [0, "gpu", 256 << 20, "gpu", 256 << 20] and [len(piece) for piece in pieces] == [100 << 20] * 3
    pieces[0][:], pieces[1][:] = 1, 2
    assert pieces[0].max() == 1 and isinstance(frame_copies.frame_copies(torch.zeros(2, 8)), HostFrames)
