"""Attention of prompts on the S-rank, chunk by chunk. It keeps K and V of prompts in prefill and of live prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcdecode.attention.base import LayerShape, PromptAttention
from hpcdecode.attention.reference import stored
from hpcdecode.engine.resumed import ResumedAttention
from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.step import Chunk

_PASSING = 64 << 20  # bytes for prompts that come in one chunk, unless one alone takes more


class StoredPrompts:
    """Attention of prompts over K and V as a narrower KV cache gives them back.

    Decoding reads those, and so does a prompt that goes on with generated tokens after an interruption. Both must see
    the same values, or the row would go on with other tokens.

    Args:
        prompts: what attends.
        layers: shapes of the attention layers.
        kv_dtype: of the KV cache.
    """

    def __init__(self, prompts: PromptAttention, layers: Sequence[LayerShape], kv_dtype: str):
        self._prompts, self._layers, self._kv_dtype = prompts, layers, kv_dtype
        self.device, self.packed_bytes, self.tokens_in = prompts.device, prompts.packed_bytes, prompts.tokens_in

    def attend(
        self,
        layer: int,
        packed: list[Tensor],
        starts: list[int],
        counts: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        skipped_queries: list[int] | None = None,
    ) -> None:
        """Attend as `PromptAttention.attend` does, over rounded k and v."""
        k, v = (self._stored(x, self._layers[layer].kv_heads) for x in (k, v))
        self._prompts.attend(layer, packed, starts, counts, q, k, v, out, sinks, skipped_queries)

    def _stored(self, x: Tensor, heads: int) -> Tensor:
        """Return x [T, heads * dim] as the KV cache gives it back."""
        return stored(x.unflatten(1, (heads, -1)), self._kv_dtype).flatten(1).to(x.dtype)


class PromptKvCache:
    """K and V of prompts, and nothing else: those of a sequence until its last chunk, those of a prefix while it lives.

    A prompt that shares a prefix begins with a copy of the prefix's.

    Args:
        attention: What attends from prompts.
        resumed: What attends from generated tokens, or None for the same as from prompts.
    """

    def __init__(self, attention: PromptAttention, resumed: ResumedAttention | None = None):
        self.attention, self._resumed = attention, resumed
        self._layers: dict[SequenceState | Prefix, list[Tensor]] = {}  # packed K and V
        self._passing = self._memory(0)  # those of prompts that come in one chunk, layer by layer

    @property
    def tokens(self) -> int:
        """Return the prompt tokens whose K and V are held."""
        return sum(s.prefilled for s in self._layers)

    def finish(self, chunks: Sequence[Chunk]) -> None:
        """Forget the prompts that are complete after this step, and the prefixes that were dropped."""
        for chunk in chunks:
            if chunk.completes and isinstance(chunk.sequence, SequenceState):
                self._layers.pop(chunk.sequence, None)
            if self._resumed and chunk.resumed:
                self._resumed.finish(chunk)
        for prefix in [s for s in self._layers if isinstance(s, Prefix) and not s.live]:
            del self._layers[prefix]

    def shrink(self) -> None:
        """Free what no prompt needs now."""
        self._passing = self._memory(0)

    def attend(
        self,
        layer: int,
        chunks: Sequence[Chunk],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        sinks: Tensor | None,
        skipped_queries: Sequence[int] | None = None,
    ) -> None:
        """Write o [T, Hq*Dv] for the chunks' tokens q [T, Hq*Dk], k [T, Hkv*Dk], v [T, Hkv*Dv], in order.

        skipped_queries: how many of a chunk's first tokens need none.
        """
        first, skipped = 0, iter(skipped_queries or [0] * len(chunks))
        for run in self._runs(layer, chunks):
            starts, counts, left = [c.start for c in run], [c.count for c in run], [next(skipped) for _ in run]
            rows = slice(first, first + sum(counts))
            packed = self._packed(layer, run)
            self.attention.attend(layer, packed, starts, counts, q[rows], k[rows], v[rows], o[rows], sinks, left)
            first = rows.stop
        if self._resumed and any(c.resumed for c in chunks):
            first = 0
            for chunk in chunks:
                rows = slice(first, first + chunk.count)
                if chunk.resumed:
                    self._resumed.attend(layer, chunk, q[rows], k[rows], v[rows], o[rows], sinks)
                first = rows.stop

    def _runs(self, layer: int, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Yield chunks that are attended together, as many as there is memory for those of one step."""
        run: list[Chunk] = []
        used = 0
        for chunk in chunks:
            size = self._size(layer, chunk) if _passes(chunk) else 0
            if run and used + size > _PASSING:
                yield run
                run, used = [], 0
            run.append(chunk)
            used += size
        if run:
            yield run

    def _packed(self, layer: int, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Return memory for the packed K and V of every chunk's prompt, with what it holds so far."""
        need = sum(self._size(layer, c) for c in chunks if _passes(c))
        if need > len(self._passing):
            self._passing = self._memory(need)
        packed, at = [], 0
        for chunk in chunks:
            size, layers = self._size(layer, chunk), self._layers.get(chunk.sequence, [])
            if _passes(chunk):
                memory = self._passing[at : at + size]
                at += size
            elif len(layers) > layer:
                memory = layers[layer]
            else:
                memory = self._memory(size)
                self._layers.setdefault(chunk.sequence, []).append(memory)
            if chunk.begins and chunk.sequence.prefix:
                held = self._layers[chunk.sequence.prefix][layer]
                memory[: self.attention.packed_bytes(layer, chunk.start)] = held
            packed.append(memory)
        return packed

    def _memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.attention.device)

    def _size(self, layer: int, chunk: Chunk) -> int:
        return self.attention.packed_bytes(layer, chunk.sequence.prompt_length)


def _passes(chunk: Chunk) -> bool:
    """Return whether the K and V of its prompt are needed in this step alone."""
    return chunk.begins and chunk.completes and isinstance(chunk.sequence, SequenceState)
