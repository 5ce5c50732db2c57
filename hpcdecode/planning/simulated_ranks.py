"""R-ranks of a simulation that carries out the plans of jobs: with KV caches larger than their memory, or with tiers.

Blocks, slots and pages are those of jobs: the same classes, without K and V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpcdecode._attn_cpu import KvCache
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.pages import Pages
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.streamed import StreamedKvCache, row_bytes_of
from hpcdecode.engine.tier_speed import TierSpeed
from hpcdecode.exchange.shares import Share
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.moves import SimulatedMovers, SimulatedStore, SimulatedTier
from hpcdecode.system.tier import Tier

_Ints = NDArray[np.int32]


class SimulatedRank(Protocol):
    """An R-rank as the simulation of a job drives it.

    Attributes:
        movers: Its clock.
    """

    movers: SimulatedMovers

    @property
    def bytes_in(self) -> int:
        """Return the bytes that came from tiers."""

    @property
    def bytes_out(self) -> int:
        """Return the bytes that went to tiers."""

    def apply(self, lane: int, share: Share) -> None:
        """Carry a plan out."""

    def attend(self, layer: int, share: Share) -> None:
        """Append and attend at a layer, which takes time."""

    def take_results(self, lane: int) -> list[tuple[int, bool]]:
        """Return the tickets of a lane that are back."""


class PagedCache(StreamedKvCache):
    """The KV cache of a job under `--schedule fluid` without K and V; what attends takes time on a clock.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type of K and V.
        sizes: Of pages.
        speeds: Of tiers, with the number of pages of each.
        slots: Sequences at once, of all lanes.
        block_tokens: Tokens of a block.

    Attributes:
        store: What counts moves.
        movers: The clock.
    """

    store: SimulatedStore
    movers: SimulatedMovers

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        sizes: PageSizes,
        speeds: Sequence[tuple[int, TierSpeed]],
        slots: int,
        block_tokens: int,
    ):
        tiers = [SimulatedTier(pages, speed) for pages, speed in speeds]
        super().__init__(layers, kv_dtype, sizes, tiers, slots, block_tokens)

    def _open_pages(
        self, native: KvCache, sizes: PageSizes, tiers: Sequence[Tier], cpus: Sequence[int] | None
    ) -> Pages:
        simulated = [tier for tier in tiers if isinstance(tier, SimulatedTier)]
        self.store = SimulatedStore(sizes, simulated, row_bytes_of(native, sizes))
        self.movers = SimulatedMovers(self.store.last_move)
        return Pages(self.store, self.movers)

    def simulate(self, layer: int, slots: _Ints, counts: _Ints, seconds: Callable[[int, int], float] | None) -> None:
        """Append to rows at a layer, or attend, group by group as their pages come in.

        Args:
            layer: Index of the layer.
            slots: int32 [n].
            counts: int32 [n], new tokens.
            seconds: That attention to cached tokens of some sequences takes; None if rows are only appended to, which
                takes none here.
        """

        def run(some: _Ints, some_counts: _Ints, tokens: NDArray[np.int64] | None) -> None:
            if seconds is not None:
                self.movers.compute(seconds(sum(map(self.length, some.tolist())), len(some)))

        self._each(layer, slots, counts, seconds is not None, int(counts.sum()), run)


class RotatingRank:
    """An R-rank whose KV cache is larger than its memory.

    Args:
        cache: Its KV cache.
        cost: Of the group.
    """

    def __init__(self, cache: PagedCache, cost: Cost):
        self.cache, self.movers, self._cost = cache, cache.movers, cost

    @property
    def bytes_in(self) -> int:
        """Return the bytes that came from tiers."""
        return self.cache.pages.counts.bytes_in

    @property
    def bytes_out(self) -> int:
        """Return the bytes that went to tiers."""
        return self.cache.pages.counts.bytes_out

    def apply(self, lane: int, share: Share) -> None:
        """Carry a plan out, as `AttentionWorker.apply` does."""
        if len(share.release):
            self.cache.release(share.release)
        for slot, new in share.fork.tolist():
            self.cache.fork(slot, new)
        for slots, counts in _pieces(share):
            self.cache.extend(slots, counts)

    def attend(self, layer: int, share: Share) -> None:
        """Append prompts and attend to decode rows, as `AttentionWorker.attend` does."""
        whole, cost = share.whole, self._cost
        if len(whole.prefill_slots):
            tokens = int(whole.prefill_counts.sum())
            self.movers.compute(cost.append_seconds_per_prompt_token * tokens / cost.layers)
            self.cache.simulate(layer, whole.prefill_slots, whole.prefill_counts, None)
        if len(whole.decode_slots):
            self.movers.compute(cost.attend_seconds_per_step / cost.layers)
            self.cache.simulate(layer, whole.decode_slots, whole.decode_counts, self._row_seconds)

    def take_results(self, lane: int) -> list[tuple[int, bool]]:
        """Return nothing: no sequence moves as a whole."""
        return []

    def _row_seconds(self, tokens: int, sequences: int) -> float:
        """Return the seconds of attention to cached tokens of some sequences at a layer."""
        return float(self._cost.attention_seconds(tokens, sequences)) / self._cost.layers


class SwappingRank:
    """An R-rank whose K and V lie in memory, with a tier for sequences that give up their room.

    Args:
        cost: Of the group.
        speed: Of the tier; None if there is none.
        token_bytes: Of a cached token.
        slots: Sequences at once, of all lanes.
    """

    def __init__(self, cost: Cost, speed: TierSpeed | None, token_bytes: float, slots: int):
        self._cost, self._speed, self._token_bytes = cost, speed, token_bytes
        self._lengths = np.zeros(slots, np.int64)
        self._left: dict[tuple[int, int], int] = {}  # tokens in the tier, by lane and ticket
        self._back: dict[int, deque[tuple[int, bool]]] = {}
        self._next = 0.0, 0.0
        self.movers = SimulatedMovers(lambda: self._next)
        self._bytes = [0, 0]  # in, out

    @property
    def bytes_in(self) -> int:
        """Return the bytes that came from the tier."""
        return self._bytes[0]

    @property
    def bytes_out(self) -> int:
        """Return the bytes that went to the tier."""
        return self._bytes[1]

    def apply(self, lane: int, share: Share) -> None:
        """Carry a plan out, as `AttentionWorker.apply` does."""
        for slot, ticket in share.swap_out.tolist():
            self._left[lane, ticket] = tokens = int(self._lengths[slot])
            self._bytes[1] += self._move(tokens, out=True, done=lambda _: None)
        self._lengths[share.release] = 0
        for slot, new in share.fork.tolist():
            self._lengths[new] = self._lengths[slot]
        for slot, ticket, tokens in share.swap_in.tolist():
            self._lengths[slot] = tokens
            del self._left[lane, ticket]
            self._bytes[0] += self._move(tokens, out=False, done=partial(self._is_back, lane, ticket))
        for slots, counts in _pieces(share):
            self._lengths[slots] += counts

    def attend(self, layer: int, share: Share) -> None:
        """Let the time of appending and attending pass."""
        whole, cost = share.whole, self._cost
        held = self._lengths[whole.decode_slots]
        seconds = cost.append_seconds_per_prompt_token * int(whole.prefill_counts.sum())
        if len(whole.decode_slots):
            seconds += float(cost.attention_seconds(held, 1).sum()) + cost.attend_seconds_per_step
        self.movers.compute(seconds / cost.layers)

    def take_results(self, lane: int) -> list[tuple[int, bool]]:
        """Return the tickets of a lane that are back."""
        return list(self._back.pop(lane, ()))

    def _move(self, tokens: int, out: bool, done: partial[None] | _Done) -> int:
        assert self._speed is not None, "sequences move to tiers that there are"
        nbytes = int(tokens * self._token_bytes)
        self._next = nbytes / (self._speed.write_rate if out else self._speed.read_rate), self._speed.busy_threads
        self.movers.move(lambda: nbytes, done)
        return nbytes

    def _is_back(self, lane: int, ticket: int, nbytes: int) -> None:
        self._back.setdefault(lane, deque()).append((ticket, True))


class _Done(Protocol):
    def __call__(self, nbytes: int, /) -> None: ...


def _pieces(share: Share) -> list[tuple[_Ints, _Ints]]:
    """Return slots and new tokens of decode rows and of prompts, those that there are."""
    whole = share.whole
    both = (whole.decode_slots, whole.decode_counts), (whole.prefill_slots, whole.prefill_counts)
    return [(slots, counts) for slots, counts in both if len(slots)]
