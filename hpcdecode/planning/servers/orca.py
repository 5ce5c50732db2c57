"""Orca: continuous batching with room for the longest answer reserved from the start.

A request enters when fewer than max_num_seqs run and its prompt and max_tokens fit. Its prompt runs at once, along
with the tokens of the others.
"""

from __future__ import annotations

from hpcdecode.planning.servers.base import Iteration, Serving


class Orca(Serving):
    """Orca's schedule; it heeds max_num_seqs only, and never preempts."""

    def next(self, now: float) -> Iteration:
        """Return all requests on the device, after those have entered that fit."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            final = request.prompt + request.most - 1
            if self.memory.need(request, final) > self.memory.free:
                break
            self.memory.take(request, final)
            self.running[self.waiting.popleft()] = None
        return Iteration([(r, r.left) for r in self.running])
