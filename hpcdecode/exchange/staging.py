"""Links whose tensors are on a device: what a lane posts is sent on once the device has come so far.

Until then other lanes go on, and whoever waits looks after it. A `StagedLink` copies to and from this host's memory,
beside the device's computing; a `DirectLink` packs on the device, for an MPI that takes its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hpcdecode.exchange.base import SLink
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan

if TYPE_CHECKING:
    from hpcdecode.exchange.mpi import MpiSLink

Pairs = Sequence[tuple[Tensor, Tensor]]  # to, from


class Queue(Protocol):
    """A device that computes what it is told, in order."""

    def tell(self, work: Callable[[], None]) -> Waitable:
        """`work` tells the device what to compute; the mark comes behind it."""


class Copies(Protocol):
    """Copies in both directions, each behind what the device has been told to compute when it is asked for."""

    def out(self, pairs: Pairs) -> Waitable:
        """From the device to pinned memory. The tensors must stay as they are until the mark is done."""

    def into(self, pairs: Pairs, after: Waitable) -> None:
        """From pinned memory to the device, after the computing that `after` came behind, and before any to come."""

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host, [rows, columns]."""


class _CudaMark:
    def __init__(self, computed: torch.cuda.Event, copied: torch.cuda.Event):
        self.computed, self.copied = computed, copied

    def Test(self) -> bool:
        return self.copied.query()


class CudaQueue:
    """The current stream of a device."""

    def __init__(self, device: torch.device):
        self.device = device

    def tell(self, work: Callable[[], None]) -> Waitable:
        work()
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        return _CudaMark(computed, computed)


class CudaCopies:
    """On two streams of their own, one a direction; ordered with the computing by events."""

    def __init__(self, device: torch.device):
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, pairs: Pairs) -> Waitable:
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        self._out.wait_event(computed)
        with torch.cuda.stream(self._out):
            for host, there in pairs:
                host.copy_(there, non_blocking=True)
        copied.record(self._out)
        return _CudaMark(computed, copied)

    def into(self, pairs: Pairs, after: Waitable) -> None:
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
    """What a lane has posted: how it is sent, and what must have been done before."""

    def __init__(self, link: SLink, send: Callable[[], None], mark: Waitable, kept: Sequence[Tensor]):
        self.link, self.send, self.mark = link, send, mark
        self.kept = kept  # on the device, for as long as they are read


class Outbox:
    """The posts of all lanes of an S-rank that are not sent yet, in the order in which they were made."""

    def __init__(self) -> None:
        self._posts: deque[_Post] = deque()

    def add(self, post: _Post) -> None:
        self._posts.append(post)
        self.send_ready()

    def send_ready(self) -> None:
        """Send what has been done."""
        while self._posts and self._posts[0].mark.Test():
            self._posts.popleft().send()

    def holds(self, link: SLink) -> bool:
        """Whether something that was posted to `link` has not been sent."""
        return any(post.link is link for post in self._posts)


class _Deferred:
    """A lane whose q, k, v and o are on a device, over a link that gets them later."""

    def __init__(self, link: SLink, outbox: Outbox):
        self.link, self.outbox = link, outbox

    def begin(self, plan: Plan) -> None:
        self.link.begin(plan)

    def done(self) -> bool:
        self.outbox.send_ready()
        return not self.outbox.holds(self.link) and self.link.done()

    def wait(self) -> None:
        wait(self)

    def take(self) -> None:
        self.link.take()

    def close(self) -> None:
        self.link.close()

    def Test(self) -> bool:
        return self.done()


class StagedLink(_Deferred):
    """Over a link that takes them in this host's memory."""

    def __init__(self, link: SLink, outbox: Outbox, copies: Copies):
        super().__init__(link, outbox)
        self.copies = copies
        self._memory: list[Tensor] = []  # pinned: q, k, v, o

    def begin(self, plan: Plan) -> None:
        self._decodes = len(plan.decode)
        super().begin(plan)

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        *rows, out = self._staged((q, k, v, o))
        self._target, self._answer = o, out
        self._mark = self.copies.out(list(zip(rows, (q, k, v), strict=True)))
        self.outbox.add(_Post(self.link, lambda: self.link.post(layer, *rows, out), self._mark, (q, k, v)))

    def take(self) -> None:
        super().take()
        if self._decodes:
            rows = slice(self._decodes)
            self.copies.into([(self._target[rows], self._answer[rows])], self._mark)

    def _staged(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for each of `like`, that of the layer before: its answer has come, and has been copied on."""
        found = []
        for i, x in enumerate(like):
            if len(self._memory) <= i or self._memory[i].numel() < x.numel():
                self._memory[i : i + 1] = [self.copies.pinned(len(x) + len(x) // 4, x.shape[1], x.dtype)]
            found.append(self._memory[i].flatten()[: x.numel()].view(x.shape))
        return found


class DirectLink(_Deferred):
    """Over a link that has its wire on the device."""

    def __init__(self, link: MpiSLink, outbox: Outbox, queue: Queue):
        super().__init__(link, outbox)
        self.queue = queue

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        mark = self.queue.tell(lambda: self.link.pack(layer, q, k, v, o))
        self.outbox.add(_Post(self.link, self.link.send, mark, (q, k, v)))


def staged(links: Sequence[SLink], device: torch.device, direct: bool) -> Sequence[SLink]:
    """The lanes' links for tensors on `device`; direct: they have their wires there."""
    if device.type == "cpu":
        return links
    outbox = Outbox()
    if direct:
        return [DirectLink(link, outbox, CudaQueue(device)) for link in links]
    copies = CudaCopies(device)
    return [StagedLink(link, outbox, copies) for link in links]
