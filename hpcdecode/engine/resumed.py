"""Attention of tokens that an earlier run generated and that are prefilled again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.schedule.step import PromptPart


class ResumedAttention:
    """Attends from generated tokens as decoding did, with the same kernels and so to the same bits.

    Prompt attention adds up in another order. Its results differ by rounding, and a sequence that goes on from them
    may draw another token near a tie. So a resumed sequence has a KV cache of its own until its last chunk.

    Args:
        open_cache: Opens a KV cache for one sequence of so many tokens, stored as the R-ranks store them.
    """

    def __init__(self, open_cache: Callable[[int], KvCache]):
        self._open_cache = open_cache
        self._caches: dict[int, KvCache] = {}
        self._tokens: dict[int, int] = {}  # that each has room for

    def attend(
        self, layer: int, part: PromptPart, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sinks: Tensor | None
    ) -> None:
        """Overwrite the rows of `o` that are those of generated tokens, if the part has any.

        Args:
            layer: Index of the attention layer. A part comes once for each that runs here, in order.
            part: Of a resumed sequence.
            q: Queries of the part's tokens [count, q_heads * k_dim].
            k: Keys [count, kv_heads * k_dim].
            v: Values [count, kv_heads * v_dim].
            o: Result of prompt attention [count, q_heads * v_dim].
            sinks: As in `KvCache.attend`.
        """
        if part.key not in self._caches:
            self._caches[part.key] = self._open_cache(part.length)
        cache = self._caches[part.key]
        if self._tokens.get(part.key, part.start) < part.start + part.count:  # at the first layer here
            cache.extend([0], [part.count])
            self._tokens[part.key] = part.start + part.count
        cache.append(layer, [0], [part.count], torch.cat((k, v), 1))
        count = min(part.start + part.count - (part.length - part.resumed), part.count)
        if count > 0:
            qkv = torch.cat((q[-count:], k[-count:], v[-count:]), 1)
            cache.attend(layer, [0], [count], qkv, o[-count:], sinks)

    def finish(self, part: PromptPart) -> None:
        """Forget the sequence of a part that completes it."""
        if part.completes:
            self.forget(part.key)

    def forget(self, key: int) -> None:
        """Forget a sequence, if it is known."""
        self._caches.pop(key, None)
        self._tokens.pop(key, None)
