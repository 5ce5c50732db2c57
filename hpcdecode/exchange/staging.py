"""Activations between a device and this host's memory, copied beside the device's computing.

A `StagedLink` is a link whose tensors are on a device. What is posted is sent on once its copy has arrived; until then
other lanes go on, and whoever waits looks after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.wait import wait
from hpcdecode.schedule.plan import Plan

Pairs = Seq[tuple[Tensor, Tensor]]  # to, from


class Mark(Protocol):
    """A copy under way."""

    def done(self) -> bool: ...


class Copies(Protocol):
    """Copies in both directions, each behind what the device has been told to compute when it is asked for."""

    def out(self, pairs: Pairs) -> Mark:
        """From the device to pinned memory. The tensors must stay as they are until the mark is done."""

    def into(self, pairs: Pairs, after: Mark) -> None:
        """From pinned memory to the device, after the computing that `after` came behind, and before any to come."""

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host, [rows, columns]."""


class _CudaMark:
    def __init__(self, computed: torch.cuda.Event, copied: torch.cuda.Event):
        self.computed, self.copied = computed, copied

    def done(self) -> bool:
        return self.copied.query()


class CudaCopies:
    """On two streams of their own, one a direction; ordered with the computing by events."""

    def __init__(self, device: torch.device):
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, pairs: Pairs) -> Mark:
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        self._out.wait_event(computed)
        with torch.cuda.stream(self._out):
            for host, there in pairs:
                host.copy_(there, non_blocking=True)
        copied.record(self._out)
        return _CudaMark(computed, copied)

    def into(self, pairs: Pairs, after: Mark) -> None:
        copied = torch.cuda.Event()
        self._in.wait_event(after.computed)
        with torch.cuda.stream(self._in):
            for there, host in pairs:
                there.copy_(host, non_blocking=True)
        copied.record(self._in)
        torch.cuda.current_stream(self.device).wait_event(copied)

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, pin_memory=True)


class _Post:
    """What a lane has posted: the arguments of the link's `post` on the host, and the copy that fills them."""

    def __init__(self, link: SLink, layer: int, rows: Seq[Tensor], mark: Mark, kept: Seq[Tensor]):
        self.link, self.layer, self.rows, self.mark = link, layer, rows, mark
        self.kept = kept  # on the device, for as long as they are copied


class Outbox:
    """The posts of all lanes of an S-rank whose copies are under way, in the order in which they were made."""

    def __init__(self, copies: Copies):
        self.copies = copies
        self._posts: deque[_Post] = deque()

    def add(self, post: _Post) -> None:
        self._posts.append(post)
        self.send_ready()

    def send_ready(self) -> None:
        """Send on what has arrived."""
        while self._posts and self._posts[0].mark.done():
            post = self._posts.popleft()
            post.link.post(post.layer, *post.rows)

    def holds(self, link: SLink) -> bool:
        """Whether something that was posted to `link` has not been sent on."""
        return any(post.link is link for post in self._posts)


class StagedLink:
    """A lane whose q, k, v and o are on a device, over a link that takes them in this host's memory."""

    def __init__(self, link: SLink, outbox: Outbox):
        self.link, self.outbox = link, outbox
        self._memory: list[Tensor] = []  # pinned: q, k, v, o

    def begin(self, plan: Plan) -> None:
        self._decodes = len(plan.decode)
        self.link.begin(plan)

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        *rows, out = self._staged((q, k, v, o))
        self._target, self._answer = o, out
        self._mark = self.outbox.copies.out(list(zip(rows, (q, k, v), strict=True)))
        self.outbox.add(_Post(self.link, layer, (*rows, out), self._mark, (q, k, v)))

    def done(self) -> bool:
        self.outbox.send_ready()
        return not self.outbox.holds(self.link) and self.link.done()

    def wait(self) -> None:
        wait(self)

    def take(self) -> None:
        self.link.take()
        if self._decodes:
            rows = slice(self._decodes)
            self.outbox.copies.into([(self._target[rows], self._answer[rows])], self._mark)

    def close(self) -> None:
        self.link.close()

    def Test(self) -> bool:
        return self.done()

    def _staged(self, like: Seq[Tensor]) -> list[Tensor]:
        """Host memory for each of `like`, that of the layer before: its answer has come, and has been copied on."""
        found = []
        for i, x in enumerate(like):
            if len(self._memory) <= i or self._memory[i].numel() < x.numel():
                self._memory[i : i + 1] = [self.outbox.copies.pinned(len(x) + len(x) // 4, x.shape[1], x.dtype)]
            found.append(self._memory[i].flatten()[: x.numel()].view(x.shape))
        return found


def staged(links: Seq[SLink], device: torch.device) -> Seq[SLink]:
    """The lanes' links for tensors on `device`."""
    if device.type == "cpu":
        return links
    outbox = Outbox(CudaCopies(device))
    return [StagedLink(link, outbox) for link in links]
