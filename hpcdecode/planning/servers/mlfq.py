"""FastServe (Wu et al. 2023): a skip-join multi-level feedback queue, preemptive at every iteration.

Level i has a quantum of 2^i iterations of one token. A request joins at the first level whose quantum its prompt takes
at most. It goes down a level when it has used the quantum up. Requests of the highest levels run, prompts and tokens
together: up to max_num_seqs of them, with at most max_num_batched_tokens, a longer prompt alone. Requests that do not
run keep their KV cache on the device while there is room. Beyond that, the lowest levels are swapped to the host. A
request that has waited for a thousand of the shortest iterations goes to the first level.
"""

from __future__ import annotations

import heapq
from itertools import count

from hpcdecode.planning.servers.base import (
    Estimate,
    Iteration,
    KvBlocks,
    ServedRequest,
    ServerLimits,
    Serving,
)

_LEVELS = 24
_STARVED = 1000  # iterations of one token


class Mlfq(Serving):
    """FastServe's schedule; it heeds both limits, and moves requests between levels rather than let them wait.

    Attributes:
        quantum: Seconds of the first level.
        levels: Requests of every level, in the order in which they joined it.
    """

    def __init__(self, limits: ServerLimits, memory: KvBlocks, estimate: Estimate):
        super().__init__(limits, memory, estimate)
        self.quantum = self.estimate.tokens(1)
        self.levels: list[dict[ServedRequest, None]] = [{} for _ in range(_LEVELS)]
        self._level: dict[ServedRequest, int] = {}
        self._used: dict[ServedRequest, float] = {}  # seconds on its level
        self._batch: dict[ServedRequest, None] = {}
        self._before = 0.0  # when the batch began
        self._waits: list[tuple[float, int, ServedRequest]] = []  # heap: since when, ties, who
        self._since: dict[ServedRequest, float] = {}  # of those that wait
        self._ties = count()

    def add(self, request: ServedRequest) -> None:
        """Put a request on the first level whose quantum its prompt takes at most."""
        prefill = self.estimate.tokens(request.prompt) + self.estimate.attention(0, request.prompt)
        level = 0
        while self.quantum * 2**level < prefill and level < _LEVELS - 1:
            level += 1
        self._join(request, level)
        self._waits_since(request, request.arrival)

    def next(self, now: float) -> Iteration:
        """Return requests of the highest levels, and swap what must give way."""
        self._charge(now)
        self._promote(now)
        batch = self._choose()
        for request in self._batch:
            if request not in batch:
                self._waits_since(request, now)
        for request in batch:
            self._since.pop(request, None)
        swapped = self._make_room(batch)
        for request in batch:
            swapped += request.cached if request.swapped else 0
            self.memory.take(request, request.length)
            self.running[request] = None
        self._batch = batch
        return Iteration([(r, r.left) for r in batch], swapped)

    def finish(self, request: ServedRequest) -> None:
        """Free a request that has its last token, and take it from its level."""
        super().finish(request)
        del self.levels[self._level.pop(request)][request], self._used[request], self._batch[request]

    def _join(self, request: ServedRequest, level: int) -> None:
        """Move a request to the end of a level."""
        if request in self._level:
            del self.levels[self._level[request]][request]
        self.levels[level][request] = None
        self._level[request], self._used[request] = level, 0.0

    def _waits_since(self, request: ServedRequest, now: float) -> None:
        """Note that a request waits."""
        self._since[request] = now
        heapq.heappush(self._waits, (now, next(self._ties), request))

    def _charge(self, now: float) -> None:
        """Charge the last iteration's time to the requests that ran; move those down that used their quantum."""
        for request in self._batch:
            self._used[request] += now - self._before
            level = self._level[request]
            if self._used[request] >= self.quantum * 2**level and level < _LEVELS - 1:
                self._join(request, level + 1)
        self._before = now

    def _promote(self, now: float) -> None:
        """Move requests to the first level that have waited for too long."""
        while self._waits and self._waits[0][0] + _STARVED * self.quantum <= now:
            since, _, request = heapq.heappop(self._waits)
            if self._since.get(request) == since:
                if self._level[request]:
                    self._join(request, 0)
                self._waits_since(request, now)

    def _choose(self) -> dict[ServedRequest, None]:
        """Return requests from the highest level down, in order, while all of them fit on the device."""
        batch: dict[ServedRequest, None] = {}
        blocks, tokens = 0, 0
        for level in self.levels:
            for request in level:
                blocks += self.memory.blocks(request.length)
                tokens += request.left
                full = len(batch) == self.limits.max_num_seqs or tokens > self.limits.max_num_batched_tokens
                if batch and (full or blocks > self.memory.total):
                    return batch
                batch[request] = None
        return batch

    def _make_room(self, batch: dict[ServedRequest, None]) -> int:
        """Swap out requests that do not run, from the lowest level up; return how many tokens that moves."""
        need, swapped = sum(self.memory.need(r, r.length) for r in batch), 0
        if need > self.memory.free:
            idle = sorted((r for r in self.running if r not in batch), key=lambda r: self._level[r])
            while need > self.memory.free:
                request = idle.pop()
                swapped += request.cached
                self.preemptions += 1
                self.memory.give(request)
                del self.running[request]
        return swapped
