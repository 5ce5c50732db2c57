"""The R-part: the KV cache of an R-rank's sequences, and their attention where it lies."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.base import Piece, Share
from hpcdecode.exchange.staging import Queue
from hpcdecode.mpi.wait import Waitable
from hpcdecode.system.timeline import Timeline


class AttentionWorker:
    """Runs plans on a KV store. queue: of the device that has it, where that is not the S-part's, too."""

    def __init__(self, store: KvCache, sinks: list[Tensor | None], timeline: Timeline, queue: Queue | None = None):
        self.store, self.sinks, self.timeline, self.queue = store, sinks, timeline, queue
        self.peak_tokens = 0

    def begin(self, lane: int, share: Share) -> None:
        """Free and make room as the plan says; raises KvCapacityError before anything is written."""
        self.timeline.enter("plan", lane)
        if len(share.release):
            self.store.release(share.release)
        for slot, new in share.fork.tolist():
            self.store.fork(slot, new)
        whole = share.whole
        if len(whole.decode_slots):
            self.store.extend(whole.decode_slots, whole.decode_counts)
        if len(whole.prefill_slots):
            self.store.extend(whole.prefill_slots, whole.prefill_counts)
        used = self.store.used_tokens
        self.peak_tokens = max(self.peak_tokens, used)
        self.timeline.load.add(used)

    def check(self) -> None:
        """Raise InvariantViolation unless every KV block is free or referenced, and counted right."""
        try:
            self.store.check()
        except RuntimeError as error:
            raise InvariantViolation("KV blocks are free or referenced", str(error)) from error

    def attend(
        self, lane: int, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor
    ) -> Waitable | None:
        """Append prompts [k | v] and rows' k and v at `layer`; write the rows' attention to out.

        Where a device does it later, returns what is complete once it has; the tensors must stay so until then.
        """
        work = partial(self._attend, lane, layer, piece, rows, prompts, out)
        return work() if self.queue is None else self.queue.tell(work)

    def _attend(self, lane: int, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor) -> None:
        if len(piece.prefill_slots):
            self.timeline.enter("append", lane)
            self.store.append(layer, piece.prefill_slots, piece.prefill_counts, prompts)
        if len(piece.decode_slots):
            self.timeline.enter("attend", lane)
            self.store.attend(layer, piece.decode_slots, piece.decode_counts, rows, out, self.sinks[layer])
