"""Packs of attention, one of which is on the device at a time (FluidInfer, section 4.2).

The longest attention that is left goes to a worker. Others get workers beside it, longest first; where one of them
leaves a bubble below the longest, the longest that fits goes into it, the earlier one of equals, until none fits. There
is a new worker while K and V fit on the device; what is left makes the next pack.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from hpcdecode.planning.servers.base import ScheduledTokens

Worker = list[ScheduledTokens]


def packed(
    work: Sequence[ScheduledTokens],
    seconds: Callable[[int, int], float],
    blocks: Callable[[ScheduledTokens], int],
    room: int,
) -> list[list[Worker]]:
    """Return packs, each as its workers.

    Args:
        work: Requests, in order of arrival, and how many of their tokens run.
        seconds: Attention by cached tokens and by count of tokens, as `Estimate.attention`.
        blocks: KV blocks that a request needs for it.
        room: KV blocks of a pack; a request that needs more has a pack of its own.
    """
    left = sorted(((-seconds(r.cached, n), i) for i, (r, n) in enumerate(work)))  # longest first, then by arrival
    packs: list[list[Worker]] = []
    while left:
        free, longest = room, -left[0][0]
        pack: list[Worker] = []
        while (worker := _worker(left, work, longest, blocks, free, alone=not pack)) is not None:
            free -= sum(map(blocks, worker))
            pack.append(worker)
        packs.append(pack)
    return packs


def _worker(
    left: list[tuple[float, int]],
    work: Sequence[ScheduledTokens],
    longest: float,
    blocks: Callable[[ScheduledTokens], int],
    free: int,
    alone: bool,
) -> Worker | None:
    """Take from what is left what a worker does in `longest` seconds; None if nothing fits into the free blocks.

    Args:
        left: (negative seconds, index of `work`), ascending.
        work: As of `packed`.
        longest: Seconds of the first worker.
        blocks: As of `packed`.
        free: KV blocks.
        alone: Whether it is the first worker, which begins whether it fits or not.
    """
    worker: Worker = []
    bubble = longest
    at = 0
    while at < len(left):
        time, index = -left[at][0], left[at][1]
        if blocks(work[index]) > free and not (alone and not worker):
            if not worker:
                return None
            break
        free -= blocks(work[index])
        bubble -= time
        worker.append(work[index])
        del left[at]
        at = bisect_left(left, (-bubble, -1))  # the longest that fits
    return worker or None
