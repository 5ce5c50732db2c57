"""Work on tensors that is shared out to threads in parts that fit into their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

ELEMENTS_AT_ONCE = 1 << 18  # float32 numbers that fit into a core's cache


def on_threads(work: Callable[[int], None], items: Sequence[int]) -> None:
    """Call `work` for each of `items`, on as many threads as torch has. Operators in it take one thread each.

    So threads wait for each other once, not in every operator. They are in inference mode if the caller is.
    """
    threads = torch.get_num_threads()
    if min(threads, len(items)) == 1:
        for item in items:
            work(item)
        return

    inference = torch.is_inference_mode_enabled()

    def in_mode(item: int) -> None:
        with torch.inference_mode(inference):
            work(item)

    try:
        torch.set_num_threads(1)  # of this thread, and of those that begin now
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            for _ in pool.map(in_mode, items):
                pass
    finally:
        torch.set_num_threads(threads)


def fill_rows(made: Tensor, rows: int, of: Callable[[int, int], Tensor]) -> Tensor:
    """Fill a tensor on threads, so many rows at a time, and return it.

    Args:
        made: The tensor.
        rows: Rows at a time.
        of: Returns those from one row up to the row before another.
    """

    def fill(first: int) -> None:
        last = min(first + rows, len(made))
        made[first:last] = of(first, last)

    on_threads(fill, range(0, len(made), rows))
    return made
