"""The R-part: the KV cache of an R-rank's sequences, and their attention where it lies."""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from hpcdecode.attention import KvStore
from hpcdecode.exchange.base import Share


class RPart:
    """Runs plans on a KV store and counts what they cost."""

    def __init__(self, store: KvStore, sinks: list[Tensor | None]):
        self.store, self.sinks = store, sinks
        self.busy_seconds = 0.0
        self.peak_tokens = 0

    def begin(self, share: Share) -> None:
        """Free and make room as the plan says; raises KvCapacityError before anything is written."""
        if len(share.release):
            self.store.release(share.release)
        for slot, new in share.fork.tolist():
            self.store.fork(slot, new)
        if len(share.decode_slots):
            self.store.extend(share.decode_slots, share.decode_counts)
        if len(share.prefill_slots):
            self.store.extend(share.prefill_slots, share.prefill_counts)
        self.peak_tokens = max(self.peak_tokens, self.store.used_tokens)

    def attend(self, layer: int, share: Share, rows: Tensor, prompts: Tensor, out: Tensor) -> None:
        """Append prompts [k | v] and rows' k and v at `layer`; write the rows' attention to out."""
        start = perf_counter()
        if len(share.prefill_slots):
            self.store.append(layer, share.prefill_slots, share.prefill_counts, prompts)
        if len(share.decode_slots):
            self.store.attend(layer, share.decode_slots, share.decode_counts, rows, out, self.sinks[layer])
        self.busy_seconds += perf_counter() - start
