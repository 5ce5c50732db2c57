"""FluidInfer: tokens of any requests go through the token-wise layers together, as many as there are.

All requests whose KV cache is on the device run, with no limit on their number. Prompts are split so that those of an
iteration have at most max_num_batched_tokens. Attention is packed by its estimated time: prompts are bound by
arithmetic and decoding by memory, so one of them hides behind the other. If the cache outgrows the device, the
latest arrivals are swapped to the host. They come back as soon as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hpcdecode.planning.servers.base import (
    Estimate,
    Iteration,
    KvBlocks,
    ScheduledTokens,
    ServedRequest,
    ServerLimits,
    Serving,
)


class Fluid(Serving):
    """FluidInfer's schedule; it heeds max_num_batched_tokens only.

    Attributes:
        out: Requests on the host, in order of arrival; they enter before all that wait.
    """

    WATERMARK = 0.01

    def __init__(self, limits: ServerLimits, memory: KvBlocks, estimate: Estimate):
        super().__init__(limits, memory, estimate)
        self.out: deque[ServedRequest] = deque()
        self._swapped = 0  # tokens, out and in, for the iteration that is made

    def next(self, now: float) -> Iteration:
        """Return all requests on the device: prompts up to the limit, and every one that decodes."""
        self._swapped = 0
        self.grow()
        self._enter(self.out)
        if not self.out:
            self._enter(self.waiting)
        budget = self.limits.max_num_batched_tokens
        prompts: list[ScheduledTokens] = []
        decodes: list[ScheduledTokens] = []
        for request in self.running:
            left = request.left
            if left == 1:
                decodes.append((request, 1))
            elif budget:
                count = min(left, budget)
                prompts.append((request, count))
                budget -= count
        packs = packed(prompts, decodes, self.estimate.attention) if prompts and decodes else None
        return Iteration(prompts + decodes, self._swapped, packs)

    def preempt(self, request: ServedRequest) -> None:
        """Swap K and V of a request to the host."""
        self._swapped += request.cached
        self.out.appendleft(request)

    def _enter(self, queue: deque[ServedRequest]) -> None:
        """Move requests to the device, in order, while there is room."""
        while queue and self.memory.need(queue[0], queue[0].length) <= self.memory.free - self.watermark:
            request = queue.popleft()
            self._swapped += request.cached
            self.memory.take(request, request.length)
            self.running[request] = None


def packed(
    prompts: Sequence[ScheduledTokens], decodes: Sequence[ScheduledTokens], seconds: Callable[[int, int], float]
) -> list[list[ScheduledTokens]]:
    """Return packs whose attention runs at once: prompts beside requests that decode.

    A pack is made around the longest attention that is left. It is filled with what fits of the other kind, longest
    first. What is left of one kind is the last pack.

    Args:
        prompts: Requests with prompt tokens.
        decodes: Requests that decode.
        seconds: Attention by cached tokens and by count of tokens, as `Estimate.attention`.
    """
    work = prompts, decodes
    queues = [
        sorted(((seconds(r.cached, n), i) for i, (r, n) in enumerate(kind)), reverse=True) for kind in work
    ]  # (seconds, index) of each kind, longest first
    packs: list[list[ScheduledTokens]] = []
    while all(queues):
        longer = int(queues[1][0][0] > queues[0][0][0])
        bubble, first = queues[longer].pop(0)
        pack, rest = [work[longer][first]], []
        for time, i in queues[1 - longer]:
            if time <= bubble:
                bubble -= time
                pack.append(work[1 - longer][i])
            else:
                rest.append((time, i))
        queues[1 - longer] = rest
        packs.append(pack)
    alone = [work[kind][i] for kind in (0, 1) for _, i in queues[kind]]
    return [*packs, alone] if alone else packs
