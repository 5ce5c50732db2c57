"""vLLM as it was published (Kwon et al. 2023): KV cache in blocks, taken as sequences grow.

Prompts go first, in iterations of their own: up to max_num_batched_tokens, a longer one alone. A request enters while
fewer than max_num_seqs run and a watermark of blocks stays free. If there is no block for a next token, the latest
arrivals give theirs up. They wait in front of all others, and compute their K and V anew.
"""

from __future__ import annotations

from hpcdecode.planning.servers.base import Iteration, ServedRequest, Serving


class VllmServer(Serving):
    """vLLM's schedule; it heeds both limits."""

    WATERMARK = 0.01

    def next(self, now: float) -> Iteration:
        """Return the prompts that enter, or else a token of every request on the device."""
        if prompts := self._admit():
            return Iteration([(r, r.left) for r in prompts])
        self.grow()
        return Iteration([(r, 1) for r in self.running])

    def preempt(self, request: ServedRequest) -> None:
        """Give up K and V of a request, and let it wait in front."""
        self.recomputed += request.cached
        request.cached = 0
        self.waiting.appendleft(request)

    def _admit(self) -> list[ServedRequest]:
        """Let requests enter, in order, and return them."""
        admitted: list[ServedRequest] = []
        tokens = 0
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            tokens += request.left
            if admitted and tokens > self.limits.max_num_batched_tokens:
                break
            if self.memory.need(request, request.length) > self.memory.free - self.watermark:
                break
            self.memory.take(request, request.length)
            self.running[self.waiting.popleft()] = None
            admitted.append(request)
        return admitted
