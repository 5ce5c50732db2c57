"""Copies of blocks that forks need, which layers make when they are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BlockCopy = tuple[int, int]  # blocks: source and target


def due_copies(copies: Sequence[BlockCopy], held: NDArray[np.bool_]) -> tuple[list[BlockCopy], list[BlockCopy]]:
    """Return the copies that must be made before free blocks are given to others, and those that can wait, in order.

    Args:
        copies: In the order in which they are to be made.
        held: bool [blocks], whether sequences hold them.
    """
    now: list[BlockCopy] = []
    later: list[BlockCopy] = []
    sources: set[int] = set()  # of copies in `now`, which come first
    for source, target in reversed(copies):
        if target in sources or (held[target] and not held[source]):
            now.append((source, target))
            sources.add(source)
        elif held[target]:
            later.append((source, target))
    return now[::-1], later[::-1]
