"""Attention of tokens that an earlier run generated and that are prefilled again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.step import Chunk


class ResumedAttention:
    """Attends from generated tokens as decoding did, with the same kernels and so to the same bits.

    Prompt attention adds up in another order. Its results differ by rounding, and a sequence that goes on from them
    may draw another token near a tie. So a resumed sequence has a KV cache of its own until its last chunk.

    Args:
        open_cache: Opens a KV cache for one sequence of so many tokens, stored as the R-ranks store them.
    """

    def __init__(self, open_cache: Callable[[int], KvCache]):
        self._open_cache = open_cache
        self._caches: dict[SequenceState, KvCache] = {}

    def attend(
        self, layer: int, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sinks: Tensor | None
    ) -> None:
        """Overwrite the rows of `o` that are those of generated tokens, if the chunk has any.

        Args:
            layer: Index of the attention layer. A chunk comes once for each, in order.
            chunk: Of a resumed sequence.
            q: Queries of the chunk's tokens [count, q_heads * k_dim].
            k: Keys [count, kv_heads * k_dim].
            v: Values [count, kv_heads * v_dim].
            o: Result of prompt attention [count, q_heads * v_dim].
            sinks: As in `KvCache.attend`.
        """
        sequence = chunk.sequence
        assert isinstance(sequence, SequenceState)
        if sequence not in self._caches:
            self._caches[sequence] = self._open_cache(sequence.prompt_length)
        cache = self._caches[sequence]
        if layer == 0:
            cache.extend([0], [chunk.count])
        cache.append(layer, [0], [chunk.count], torch.cat((k, v), 1))
        count = min(chunk.start + chunk.count - len(sequence.prompt.token_ids), chunk.count)
        if count > 0:
            qkv = torch.cat((q[-count:], k[-count:], v[-count:]), 1)
            cache.attend(layer, [0], [count], qkv, o[-count:], sinks)

    def finish(self, chunk: Chunk) -> None:
        """Forget the sequence of a chunk that completes it."""
        if chunk.completes:
            assert isinstance(chunk.sequence, SequenceState)
            del self._caches[chunk.sequence]
