"""What a device does, done late in memory of the host, for what must wait for it.

Memory that is copied too early or taken again too soon holds NaN.
"""

from __future__ import annotations

import torch


class Late:
    """Work that happens after it was asked about `patience` times."""

    def __init__(self, work, patience):
        self.work, self.left = work, patience

    def Test(self):
        if self.left == 0:
            self.work()
        self.left -= 1
        return self.left < 0


class LateCopies:
    def __init__(self, patience):
        self.patience = patience

    def out(self, pairs):
        for host, _ in pairs:
            host.fill_(float("nan"))
        return Late(lambda: [to.copy_(source) for to, source in pairs], self.patience)

    def into(self, pairs, after):
        assert after.left < 0, "o goes back before q, k and v have left"
        for to, source in pairs:
            to.copy_(source)
            source.fill_(float("nan"))

    def pinned(self, rows, columns, dtype):
        return torch.full((rows, columns), float("nan"), dtype=dtype)
