"""Lamina's pipelines event by event: batches over replicas of the model and one pool that attends to a batch at a time.

Batch j runs slice k on replica (j + k) mod (n - 1) with rotation, and on replica j without. A slice takes
`slice_seconds`, and the pool's attention `attend_seconds`. Who comes first is served first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

SLICES = 600  # of every batch


def rotated_slices(batches: int, replicas: int, slice_seconds: float, attend_seconds: float) -> float:
    """Return the slices per second of batches that go to the next replica after every slice (section 5.1)."""
    return _slices(batches, replicas, slice_seconds, attend_seconds, lambda j, k: (j + k) % replicas)


def fixed_slices(batches: int, replicas: int, slice_seconds: float, attend_seconds: float) -> float:
    """Return the slices per second of batches that stay on their replica and wait there."""
    return _slices(batches, replicas, slice_seconds, attend_seconds, lambda j, k: j % replicas)


class _Server:
    """What runs a thing at a time: a replica, or the pool; `queue` waits for it."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.busy = False


def _slices(
    batches: int, replicas: int, slice_seconds: float, attend_seconds: float, replica_of: Callable[[int, int], int]
) -> float:
    """Return the slices per second in the middle third of a run."""
    servers = [_Server() for _ in range(replicas)]
    pool, done, ends = _Server(), [0] * batches, []
    events: list[
        tuple[float, int, int]
    ] = []  # (when, batch, the server that is done; the number of replicas: the pool)

    def begin(server: int, now: float) -> None:
        one = servers[server] if server < replicas else pool
        if one.queue and not one.busy:
            one.busy = True
            seconds = slice_seconds if server < replicas else attend_seconds
            heapq.heappush(events, (now + seconds, one.queue.popleft(), server))

    def arrive(batch: int, server: int, now: float) -> None:
        (servers[server] if server < replicas else pool).queue.append(batch)
        begin(server, now)

    for j in range(batches):
        arrive(j, replica_of(j, 0), 0.0)
    while events:
        now, batch, server = heapq.heappop(events)
        (servers[server] if server < replicas else pool).busy = False
        if server < replicas:
            arrive(batch, replicas, now)
        else:
            done[batch] += 1
            ends.append(now)
            if done[batch] < SLICES:
                arrive(batch, replica_of(batch, done[batch]), now)
        begin(server, now)
    third = len(ends) // 3
    return third / (ends[2 * third] - ends[third])
