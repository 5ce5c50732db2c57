"""Attention of prompts on the S-rank, chunk by chunk. It keeps K and V only of prompts that are not complete."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from hpcdecode.attention import PromptAttention
from hpcdecode.schedule.injector import Chunk
from hpcdecode.schedule.sequence import Sequence


class PrefillCache:
    """K and V of the prompts in prefill, and nothing else: a prompt's are dropped with its last chunk."""

    def __init__(self, attention: PromptAttention):
        self.attention = attention
        self._layers: dict[Sequence, list[Tensor]] = {}  # packed K and V
        self._passing = torch.empty(0, dtype=torch.uint8)  # those of prompts that come in one chunk, layer by layer

    @property
    def tokens(self) -> int:
        """Prompt tokens whose K and V are held."""
        return sum(s.prefilled for s in self._layers)

    def finish(self, chunks: Seq[Chunk]) -> None:
        """Forget the prompts that are complete after this step."""
        for chunk in chunks:
            if chunk.completes:
                self._layers.pop(chunk.sequence, None)

    def attend(
        self, layer: int, chunks: Seq[Chunk], q: Tensor, k: Tensor, v: Tensor, o: Tensor, sinks: Tensor | None
    ) -> None:
        """Write o [T, Hq*Dv] for the chunks' tokens q [T, Hq*Dk], k [T, Hkv*Dk], v [T, Hkv*Dv], in order."""
        starts, counts = [c.start for c in chunks], [c.count for c in chunks]
        self.attention.attend(layer, self._packed(layer, chunks), starts, counts, q, k, v, o, sinks)

    def _packed(self, layer: int, chunks: Seq[Chunk]) -> list[Tensor]:
        """Memory for the packed K and V of every chunk's prompt, with what it holds so far."""
        sizes = [self.attention.packed_bytes(layer, c.sequence.prompt_length) for c in chunks]
        passing = [c.start == 0 and c.completes for c in chunks]
        need = sum(size for size, passes in zip(sizes, passing, strict=True) if passes)
        if need > len(self._passing):
            self._passing = torch.empty(need, dtype=torch.uint8)
        packed, at = [], 0
        for chunk, size, passes in zip(chunks, sizes, passing, strict=True):
            if passes:
                packed.append(self._passing[at : at + size])
                at += size
                continue
            layers = self._layers.setdefault(chunk.sequence, [])
            if len(layers) <= layer:
                layers.append(torch.empty(size, dtype=torch.uint8))
            packed.append(layers[layer])
        return packed
