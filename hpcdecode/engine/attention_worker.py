"""The attention of an R-rank: the KV cache of its sequences, and their attention where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from hpcdecode.attention.base import KvCache, LayerRows
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.host import HostKvCache
from hpcdecode.engine.kv_swap import KvSwap
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.device import Accelerator
from hpcdecode.exchange.device_pieces import DevicePieces
from hpcdecode.exchange.shares import Piece, Share
from hpcdecode.mpi.wait import Waitable
from hpcdecode.system.timeline import Timeline


class AttentionWorker:
    """Runs plans on a KV cache.

    Args:
        kv_cache: for this rank's part of every layer.
        sinks: float32 [q_heads] of every layer, or None.
        timeline: of this rank.
        queue: the device that has the KV cache, if that is not the device of the slices, too.
        swap: tiers for what leaves the KV cache, or None.

    Attributes:
        peak_tokens: the most tokens in the KV cache so far.
    """

    def __init__(
        self,
        kv_cache: KvCache,
        sinks: Sequence[Tensor | None],
        timeline: Timeline,
        queue: Accelerator | None = None,
        swap: KvSwap | None = None,
    ):
        self.kv_cache, self.sinks, self.timeline, self.queue = kv_cache, sinks, timeline, queue
        self.swap = swap
        self._pieces = DevicePieces(queue) if queue is not None and isinstance(kv_cache, HostKvCache) else None
        self.peak_tokens = 0

    def apply(self, lane: int, share: Share) -> None:
        """Shorten and free slots, fork and make room as a plan says.

        Raises:
            KvCapacityError: the KV cache has no room; nothing was written.
        """
        self.timeline.enter("plan", lane)
        for slot, length in share.truncate.tolist():
            self.kv_cache.truncate(slot, length)
        for slot, ticket in share.swap_out.tolist():
            self._tiers.out(lane, slot, ticket)
        if self.swap and share.stop:
            self.swap.forget(lane)
        if len(share.release):
            self.kv_cache.release(share.release)
        for slot, new in share.fork.tolist():
            self.kv_cache.fork(slot, new)
        if len(share.swap_in):
            self.kv_cache.extend(*np.ascontiguousarray(share.swap_in[:, (0, 2)].T))
        for slot, ticket, _ in share.swap_in.tolist():
            self._tiers.bring(lane, slot, ticket)
        whole = share.whole
        if len(whole.decode_slots):
            self.kv_cache.extend(whole.decode_slots, whole.decode_counts)
        if len(whole.prefill_slots):
            self.kv_cache.extend(whole.prefill_slots, whole.prefill_counts)
        used = self.kv_cache.used_tokens
        self.peak_tokens = max(self.peak_tokens, used)
        self.timeline.load.add(used)

    @property
    def _tiers(self) -> KvSwap:
        if self.swap is None:
            raise InvariantViolation("sequences move to tiers that there are", "the R-rank has none")
        return self.swap

    def take_swapped(self, lane: int) -> list[tuple[int, bool]]:
        """Return the tickets of a lane that were dealt with since the last call, and whether all is back."""
        return self.swap.take_results(lane) if self.swap else []

    def check(self) -> None:
        """Raise InvariantViolation unless KV blocks and chunks of tiers are free or held, and counted right."""
        if self.swap:
            self.swap.check()
        try:
            self.kv_cache.check()
        except RuntimeError as error:
            raise InvariantViolation("KV blocks are free or referenced", str(error)) from error

    def attend(
        self, lane: int, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor
    ) -> Waitable | None:
        """Append K and V of prompts and decode rows at `layer`; write the output of the decode rows to `out`.

        Args:
            lane: that the rows are from, for the timeline.
            layer: index of the layer.
            piece: whose rows they are.
            rows: [q | k | v] of decode rows, [n, row_columns], or whole rows of a layer that keeps a state.
            prompts: [k | v] of prompt tokens, [m, kv_columns].
            out: [n, out_columns].

        Returns:
            None if it is done; else a mark that is done once a device has, until when the tensors must stay.
        """
        work = partial(self._attend, lane, layer, piece)
        if self._pieces is not None:
            return self._pieces.attend(work, rows, prompts, out)
        if self.queue is not None:
            return self.queue.tell(partial(work, rows, prompts, out))
        work(rows, prompts, out)
        return None

    def rows_beside(self, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor) -> LayerRows:
        """Return what `attend` would do, for prompt attention on the same threads to do beside its own work."""
        assert isinstance(self.kv_cache, CpuKvCache), "rows beside prompts: expected the KV cache of CPUs"
        appended = (piece.prefill_slots, piece.prefill_counts, prompts)
        attended = (piece.decode_slots, piece.decode_counts, rows, out)
        return self.kv_cache.layer_rows(layer, appended, attended, self.sinks[layer])

    def _attend(self, lane: int, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor) -> None:
        if len(piece.prefill_slots):
            self.timeline.enter("append", lane)
            self.kv_cache.append(layer, piece.prefill_slots, piece.prefill_counts, prompts)
        if len(piece.decode_slots):
            self.timeline.enter("attend", lane)
            self.kv_cache.attend(layer, piece.decode_slots, piece.decode_counts, rows, out, self.sinks[layer])
