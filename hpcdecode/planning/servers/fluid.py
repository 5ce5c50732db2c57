"""FluidInfer: tokens of any requests go through the token-wise layers together, as many as there are.

All requests whose KV cache is on the device run, with no limit on their number; prompts are split so that those of an
iteration have at most max_num_batched_tokens. Attention is packed by its estimated time: prompts are bound by
arithmetic and decoding by memory, so that one of them hides behind the other. Where the cache outgrows the device, that
of the latest arrivals is swapped to the host, and back as soon as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hpcdecode.planning.servers.base import Iteration, ServedRequest, Serving

Work = tuple[ServedRequest, int]


class Fluid(Serving):
    WATERMARK = 0.01

    def __init__(self, *args):
        super().__init__(*args)
        self.out: deque[ServedRequest] = deque()  # on the host, in order of arrival, before all that wait
        self._swapped = 0  # tokens, out and in, for the iteration that is made

    def next(self, now: float) -> Iteration:
        self._swapped = 0
        self.grow()
        self._enter(self.out)
        if not self.out:
            self._enter(self.waiting)
        budget, prompts, decodes = self.limits.max_num_batched_tokens, [], []
        for request in self.running:
            left = request.left
            if left == 1:
                decodes.append((request, 1))
            elif budget:
                prompts.append((request, min(left, budget)))
                budget -= prompts[-1][1]
        packs = packed(prompts, decodes, self.estimate.attention) if prompts and decodes else None
        return Iteration(prompts + decodes, self._swapped, packs)

    def preempt(self, request: ServedRequest) -> None:
        self._swapped += request.cached
        self.out.appendleft(request)

    def _enter(self, queue: deque[ServedRequest]) -> None:
        """Those that have room, in order."""
        while queue and self.memory.need(queue[0], queue[0].length) <= self.memory.free - self.watermark:
            request = queue.popleft()
            self._swapped += request.cached
            self.memory.take(request, request.length)
            self.running[request] = None


def packed(prompts: Sequence[Work], decodes: Sequence[Work], seconds: Callable[[int, int], float]) -> list[list[Work]]:
    """Packs around the longest work that is left, filled with what fits of the other kind, longest first.

    seconds: of the attention of so many tokens to those cached.
    """
    kinds = [
        sorted(((seconds(r.cached, n), i) for i, (r, n) in enumerate(k)), reverse=True) for k in (prompts, decodes)
    ]
    work, packs = (prompts, decodes), []
    while all(kinds):
        longer = int(kinds[1][0][0] > kinds[0][0][0])
        room, first = kinds[longer].pop(0)
        pack, rest = [work[longer][first]], []
        for time, i in kinds[1 - longer]:
            if time <= room:
                room -= time
                pack.append(work[1 - longer][i])
            else:
                rest.append((time, i))
        kinds[1 - longer] = rest
        packs.append(pack)
    alone = [work[k][i] for k in (0, 1) for _, i in kinds[k]]
    return [*packs, alone] if alone else packs
