"""Attention of those tokens of prompts that attend as in decoding: resumed ones, and those that indexers choose for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.schedule.step import PromptPart

_COPIED = 64 << 20  # bytes of a prefix at once


class ResumedAttention:
    """Attends from some tokens of prompts as decoding does, with the same kernels and so to the same bits.

    Prompt attention adds up in another order. Its results differ by rounding, and a sequence that goes on from them
    may draw another token near a tie. So a resumed sequence has a KV cache of its own until its last chunk.

    Where indexers choose tokens, prompt attention, which is over all, serves the positions that see no more than they
    choose. A longer prompt has a KV cache too, and attends from its other tokens here. So does a prefix, for prompts
    that begin with it. At layers with compressed entries all tokens attend here.

    Args:
        open_cache: Opens a KV cache for one sequence of so many tokens, stored as the R-ranks store them.
        layers: Shapes of the attention layers.
    """

    def __init__(self, open_cache: Callable[[int], KvCache], layers: Sequence[LayerShape] = ()):
        self._open_cache = open_cache
        self._most = [shape.chooses_from for shape in layers]
        self._least = min((most for most in self._most if most is not None), default=None)
        self._caches: dict[int, KvCache] = {}
        self._tokens: dict[int, int] = {}  # that each has room for

    def takes(self, part: PromptPart) -> bool:
        """Return whether K and V of a part's prompt are kept here."""
        chosen_for = self._least is not None and (part.lasts or part.length > self._least)
        return part.resumed > 0 or chosen_for

    def attend(
        self, layer: int, part: PromptPart, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sinks: Tensor | None
    ) -> None:
        """Overwrite the rows of `o` that are those of tokens which attend here, if the part has any.

        Args:
            layer: Index of the attention layer. A part comes once for each that runs here, in order.
            part: Of a prompt that is kept here.
            q: Queries of the part's tokens [count, q_heads * k_dim].
            k: Keys [count, kv_heads * k_dim].
            v: Values [count, kv_heads * v_dim].
            o: Result of prompt attention [count, q_heads * v_dim].
            sinks: As in `KvCache.attend`.
        """
        if part.key not in self._caches:
            self._caches[part.key] = self._opened(part)
        cache = self._caches[part.key]
        if self._tokens.get(part.key, part.start) < part.start + part.count:  # at the first layer here
            cache.extend([0], [part.count])
            self._tokens[part.key] = part.start + part.count
        cache.append(layer, [0], [part.count], torch.cat((k, v), 1))
        count = min(part.start + part.count - self._first(layer, part), part.count)
        if count > 0:
            qkv = torch.cat((q[-count:], k[-count:], v[-count:]), 1)
            cache.attend(layer, [0], [count], qkv, o[-count:], sinks)

    def _first(self, layer: int, part: PromptPart) -> int:
        """Return the first position of a part's prompt that attends here."""
        generated, most = part.length - part.resumed, self._most[layer] if self._most else None
        return generated if most is None else min(generated, most)

    def _opened(self, part: PromptPart) -> KvCache:
        """Return a KV cache for a part's prompt, with the prefix that it begins with, in whole blocks."""
        cache = self._open_cache(part.length)
        if part.shared:
            prefix = self._caches[part.prefix]
            assert isinstance(cache, CpuKvCache) and isinstance(prefix, CpuKvCache), "expected KV caches on the CPU"
            cache.extend([0], [part.shared])
            size = cache.native.block_bytes
            room = torch.empty(max(_COPIED // size, 1) * size, dtype=torch.uint8)
            blocks, step = part.shared // cache.block_tokens, len(room) // size
            for first in range(0, blocks, step):
                some = room[: min(step, blocks - first) * size]
                prefix.native.copy_out(0, first, some)
                cache.native.copy_in(0, first, some)
        return cache

    def finish(self, part: PromptPart) -> None:
        """Forget the sequence of a part that completes it; a prefix stays."""
        if part.completes and not part.lasts:
            self.forget(part.key)

    def forget(self, key: int) -> None:
        """Forget a sequence, if it is known."""
        self._caches.pop(key, None)
        self._tokens.pop(key, None)
