"""FluidInfer: tokens of any requests go through the token-wise layers together, as many as there are.

Requests enter with no limit on their number. Prompts are split so that those of an iteration have at most
max_num_batched_tokens. While K and V of all fit on the device, they stay there. If they do not, they lie on the host,
and groups of requests take turns at attention in every iteration: one attends while the next one comes in (section
4.1). Groups are packs (section 4.2, `packing`): prompts are bound by arithmetic and decoding by memory, so within a
pack one of them hides behind the other.
"""

from __future__ import annotations

from collections import deque

from hpcdecode.planning.servers.base import (
    Estimate,
    Iteration,
    KvBlocks,
    ScheduledTokens,
    ServedRequest,
    ServerLimits,
    Serving,
)
from hpcdecode.planning.servers.packing import packed


class Fluid(Serving):
    """FluidInfer's schedule; it heeds max_num_batched_tokens and swap_space.

    Attributes:
        parked: Requests that grew beyond device and swap_space, in order of arrival; they enter before all that wait.
        cycling: Whether groups take turns on the device.
        room: Blocks of a group that takes turns: half of the device's, as the next one comes in beside it.
    """

    WATERMARK = 0.01

    def __init__(self, limits: ServerLimits, memory: KvBlocks, estimate: Estimate):
        super().__init__(limits, memory, estimate)
        self.parked: deque[ServedRequest] = deque()
        self.cycling = False
        self._leaving = 0  # tokens of parked requests that leave the device
        self.room = max(memory.total // 2, 1)
        self._most = memory.total + limits.swap_space / memory.block_tokens  # blocks of requests in flight

    def next(self, now: float) -> Iteration:
        """Return all requests in flight: prompts up to the limit, and every one that decodes."""
        blocks = self._park(sum(self.memory.blocks(request.length) for request in self.running))
        blocks = self._enter(self.parked, blocks)
        if not self.parked:
            blocks = self._enter(self.waiting, blocks)
        moved = self._place(blocks)
        work = self._work()
        if not self.cycling:
            return Iteration(work, moved, [work])
        packs = packed(work, self.estimate.attention, lambda each: self.memory.blocks(each[0].length), self.room)
        groups = [[each for worker in pack for each in worker] for pack in packs]
        # each group's K and V come in, and what the iteration adds goes out, as they are only appended to
        return Iteration(work, moved + sum(r.cached for r, _ in work) + sum(n for _, n in work), groups)

    def _work(self) -> list[ScheduledTokens]:
        """Return the tokens that run, in order of arrival."""
        budget = self.limits.max_num_batched_tokens
        work: list[ScheduledTokens] = []
        for request in self.running:
            left = request.left
            if left == 1:
                work.append((request, 1))
            elif budget:
                count = min(left, budget)
                work.append((request, count))
                budget -= count
        return work

    def _park(self, blocks: int) -> int:
        """Park the latest arrivals while more than device and swap_space hold is in flight; return the blocks left."""
        while blocks > self._most and len(self.running) > 1:
            latest, _ = self.running.popitem()
            blocks -= self.memory.blocks(latest.length)
            self.preemptions += 1
            self._leaving += latest.cached * bool(latest.blocks)
            self.memory.give(latest)
            self.parked.appendleft(latest)
        return blocks

    def _enter(self, queue: deque[ServedRequest], blocks: int) -> int:
        """Let requests enter, in order, while there is room; return the blocks of all in flight."""
        while queue and (
            not self.running or blocks + self.memory.blocks(queue[0].length) <= self._most - self.watermark
        ):
            request = queue.popleft()
            blocks += self.memory.blocks(request.length)
            self.running[request] = None
        return blocks

    def _place(self, blocks: int) -> int:
        """Take the blocks of all requests if they fit, or else free them; return the tokens that move for it."""
        moved, self._leaving = self._leaving, 0
        self.cycling = blocks > self.memory.total
        for request in self.running:
            if self.cycling:
                moved += request.cached * bool(request.blocks)
                self.memory.give(request)
            else:
                moved += request.cached * (not request.blocks)
                self.memory.take(request, request.length)
        return moved
