"""Attention of prompts on the S-rank, part by part. It keeps K and V of prompts in prefill and of live prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hpcdecode.attention.base import KvCache, LayerRows, LayerSeconds, PromptAttention
from hpcdecode.attention.reference import stored_rows
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.engine.resumed import ResumedAttention
from hpcdecode.schedule.step import PromptPart

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
        self.attends_beside = prompts.attends_beside

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
        beside: LayerRows | None = None,
    ) -> LayerSeconds | None:
        """Attend as `PromptAttention.attend` does, over rounded k and v."""
        shape = self._layers[layer]
        rows = stored_rows(torch.cat([k, v], 1), shape, self._kv_dtype).to(k.dtype)
        k, v = rows.split([shape.k_columns, shape.v_columns], 1)
        return self._prompts.attend(layer, packed, starts, counts, q, k, v, out, sinks, skipped_queries, beside)


class PromptsBeforeChoice:
    """Attention of prompts from the positions that see no more tokens than the layer's indexer chooses.

    At layers with compressed entries there are none. `ResumedAttention` attends from the others. What is packed does
    not grow beyond these positions.

    Args:
        prompts: what attends.
        layers: shapes of the attention layers.
    """

    def __init__(self, prompts: PromptAttention, layers: Sequence[LayerShape]):
        self._prompts = prompts
        self._most = [shape.chooses_from for shape in layers]
        self.device, self.tokens_in = prompts.device, prompts.tokens_in

    def attends_beside(self, kv_cache: KvCache) -> bool:
        """Return False: rows of a KV cache that chooses are attended from alone."""
        return False

    def packed_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes that are packed of a prompt of `tokens` tokens at `layer`."""
        most = self._most[layer]
        return self._prompts.packed_bytes(layer, tokens if most is None else min(tokens, most))

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
        beside: LayerRows | None = None,
    ) -> LayerSeconds | None:
        """Attend as `PromptAttention.attend` does; rows of out stay as they are from the other positions on."""
        assert beside is None, "expected no rows beside prompts of a model whose indexers choose"
        most, skipped = self._most[layer], skipped_queries or [0] * len(counts)
        if most is None or all(start + count <= most for start, count in zip(starts, counts, strict=True)):
            return self._prompts.attend(layer, packed, starts, counts, q, k, v, out, sinks, skipped)
        own = [min(max(most - start, 0), count) for start, count in zip(starts, counts, strict=True)]
        firsts = accumulate(counts, initial=0)
        rows = torch.cat([torch.arange(first, first + n) for first, n in zip(firsts, own, strict=False)])
        some = [i for i, n in enumerate(own) if n]
        if not some:
            return None
        o = out[rows]
        memory, begins = [packed[i] for i in some], [starts[i] for i in some]
        lengths, left = [own[i] for i in some], [min(skipped[i], own[i]) for i in some]
        self._prompts.attend(layer, memory, begins, lengths, q[rows], k[rows], v[rows], o, sinks, left)
        out[rows] = o
        return None


@dataclass
class HeldPrompt:
    """K and V of a prompt.

    Attributes:
        layers: Packed, by each layer that runs here, with room for all of the prompt.
        tokens: That were prefilled, all layers of them.
    """

    layers: dict[int, Tensor]
    tokens: int = 0


class PromptKvCache:
    """K and V of prompts, and nothing else: those of a sequence until its last chunk, those of a prefix while it lives.

    A prompt that shares a prefix begins with a copy of the prefix's.

    Args:
        attention: What attends from prompts.
        resumed: What attends from generated tokens, and from those that indexers choose for; None for `attention`.
    """

    def __init__(self, attention: PromptAttention, resumed: ResumedAttention | None = None):
        self.attention, self._resumed = attention, resumed
        self._held: dict[int, HeldPrompt] = {}
        self._passing = self._memory(0)  # packed K and V of prompts that come in one part, layer by layer

    @property
    def tokens(self) -> int:
        """Return the prompt tokens whose K and V are held."""
        return sum(held.tokens for held in self._held.values())

    @property
    def keys(self) -> set[int]:
        """Return the sequences and prefixes whose K and V are held."""
        return set(self._held)

    def finish(self, parts: Sequence[PromptPart], forgotten: Sequence[int] = ()) -> None:
        """Forget the prompts that are complete after this step, and prefixes and prompts whose keys are `forgotten`."""
        for part in parts:
            if part.completes and not part.lasts:
                self._held.pop(part.key, None)
            elif part.key in self._held:
                self._held[part.key].tokens = part.start + part.count
            if self._resumed and self._resumed.takes(part):
                self._resumed.finish(part)
        for key in forgotten:
            self._held.pop(key, None)
            if self._resumed:
                self._resumed.forget(key)

    def shrink(self) -> None:
        """Free what no prompt needs now."""
        self._passing = self._memory(0)

    def attend(
        self,
        layer: int,
        parts: Sequence[PromptPart],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        sinks: Tensor | None,
        skipped_queries: Sequence[int] | None = None,
        beside: LayerRows | None = None,
    ) -> LayerSeconds | None:
        """Write o [T, Hq*Dv] for the parts' tokens q [T, Hq*Dk], k [T, Hkv*Dk], v [T, Hkv*Dv], in order.

        Args:
            layer: that attends.
            parts: of prompts.
            q: queries of their tokens.
            k: keys.
            v: values.
            o: output.
            sinks: of the layer, or None.
            skipped_queries: how many of a part's first tokens need no output.
            beside: rows for a KV cache, as `PromptAttention.attend` takes them.

        Returns:
            What took how long of the call that did the rows beside, if any.
        """
        spent: LayerSeconds | None = None
        first, skipped = 0, iter(skipped_queries or [0] * len(parts))
        for run in self._runs(layer, parts):
            starts, counts, left = [p.start for p in run], [p.count for p in run], [next(skipped) for _ in run]
            rows = slice(first, first + sum(counts))
            packed = self._packed(layer, run)
            own = (q[rows], k[rows], v[rows], o[rows], sinks, left)
            seconds = self.attention.attend(layer, packed, starts, counts, *own, beside)
            spent, beside = (seconds, None) if beside else (spent, None)
            first = rows.stop
        if self._resumed:
            first = 0
            for part in parts:
                rows = slice(first, first + part.count)
                if self._resumed.takes(part):
                    self._resumed.attend(layer, part, q[rows], k[rows], v[rows], o[rows], sinks)
                first = rows.stop
        return spent

    def _runs(self, layer: int, parts: Sequence[PromptPart]) -> Iterator[list[PromptPart]]:
        """Yield parts that are attended together, as many as there is memory for those of one step."""
        run: list[PromptPart] = []
        used = 0
        for part in parts:
            size = self._size(layer, part) if _passes(part) else 0
            if run and used + size > _PASSING:
                yield run
                run, used = [], 0
            run.append(part)
            used += size
        if run:
            yield run

    def _packed(self, layer: int, parts: Sequence[PromptPart]) -> list[Tensor]:
        """Return memory for the packed K and V of every part's prompt, with what it holds so far."""
        need = sum(self._size(layer, p) for p in parts if _passes(p))
        if need > len(self._passing):
            self._passing = self._memory(need)
        packed, at = [], 0
        for part in parts:
            size = self._size(layer, part)
            if _passes(part):
                memory = self._passing[at : at + size]
                at += size
            else:
                layers = self._held.setdefault(part.key, HeldPrompt({})).layers
                if layer not in layers:
                    layers[layer] = self._memory(size)
                memory = layers[layer]
            if part.begins and part.shared:
                held = self._held[part.prefix].layers[layer]
                memory[: self.attention.packed_bytes(layer, part.start)] = held
            packed.append(memory)
        return packed

    def _memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.attention.device)

    def _size(self, layer: int, part: PromptPart) -> int:
        return self.attention.packed_bytes(layer, part.length)


def _passes(part: PromptPart) -> bool:
    """Return whether the K and V of its prompt are needed in this step alone."""
    return part.begins and part.completes and not part.lasts
