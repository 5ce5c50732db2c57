"""Links whose tensors are on a device: what a lane sends is passed on once the device has come so far.

Until then other lanes go on, and whoever waits looks after it. A `StagedLink` copies to and from this host's memory,
beside the device's computing. A `DirectLink` packs on the device, for an MPI that takes its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcdecode.exchange.base import SLink
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan

_OUTPUT = -1  # place of o beside those of rows
Pairs = Sequence[tuple[Tensor, Tensor]]  # to, from


class Queue(Protocol):
    """A device that computes what it is told, in order."""

    def tell(self, work: Callable[[], None]) -> Waitable:
        """Call `work`, which tells the device what to compute; return a mark that comes behind it."""


class Copies(Protocol):
    """Copies in both directions, each behind what the device has been told to compute when it is asked for."""

    def out(self, pairs: Pairs) -> Waitable:
        """Copy from the device to pinned memory. The tensors must stay as they are until the mark is done."""

    def into(self, pairs: Pairs, after: Waitable) -> None:
        """Copy from pinned memory to the device.

        The copy comes after the computing that `after` came behind, and before any to come.
        """

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the host, [rows, columns]."""


class PackingLink(SLink, Protocol):
    """A link that packs on the device what it sends, and sends it later."""

    def pack(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Do `send_rows` as far as a device does it."""

    def send_packed(self) -> None:
        """Do the rest of it."""

    def send_packed_away(self) -> None:
        """Do the rest of `send_away`."""


class CudaMark:
    """Two points of a device's work: what was computed, and what was copied behind it."""

    def __init__(self, computed: torch.cuda.Event, copied: torch.cuda.Event):
        self.computed, self.copied = computed, copied

    def Test(self) -> bool:
        """Return whether the device has come past both."""
        return bool(self.copied.query())


class CudaQueue:
    """The current stream of a device."""

    def __init__(self, device: torch.device):
        self.device = device

    def tell(self, work: Callable[[], None]) -> CudaMark:
        """Call `work` and record an event behind it."""
        work()
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        return CudaMark(computed, computed)


class CudaCopies:
    """Copies on two streams of their own, one a direction; ordered with the computing by events."""

    def __init__(self, device: torch.device):
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, pairs: Pairs) -> CudaMark:
        """Copy from the device to pinned memory."""
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        self._out.wait_event(computed)
        with torch.cuda.stream(self._out):
            for host, there in pairs:
                host.copy_(there, non_blocking=True)
        copied.record(self._out)
        return CudaMark(computed, copied)

    def into(self, pairs: Pairs, after: Waitable) -> None:
        """Copy from pinned memory to the device."""
        if not isinstance(after, CudaMark):
            raise TypeError(f"after: expected a mark of this device, got {type(after).__name__}")
        copied = torch.cuda.Event()
        self._in.wait_event(after.computed)
        with torch.cuda.stream(self._in):
            for there, host in pairs:
                there.copy_(host, non_blocking=True)
        copied.record(self._in)
        torch.cuda.current_stream(self.device).wait_event(copied)

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory of the host, [rows, columns]."""
        return torch.empty(rows, columns, dtype=dtype, pin_memory=True)


class _Post:
    """What a lane is to send, and what must have been done before.

    Args:
        link: that it goes over.
        send: sends it.
        mark: is done once it may be sent.
        kept: tensors on the device, for as long as they are read.
    """

    def __init__(self, link: SLink, send: Callable[[], None], mark: Waitable, kept: Sequence[Tensor]):
        self.link, self.send, self.mark, self.kept = link, send, mark, kept


class Outbox:
    """What all lanes of an S-rank have not sent yet, in the order in which it was made."""

    def __init__(self) -> None:
        self._posts: deque[_Post] = deque()

    def add(self, post: _Post) -> None:
        """Take a post; send what is ready."""
        self._posts.append(post)
        self.send_ready()

    def send_ready(self) -> None:
        """Send what the device has done."""
        while self._posts and self._posts[0].mark.Test():
            self._posts.popleft().send()

    def holds(self, link: SLink) -> bool:
        """Return whether something for `link` has not been sent."""
        return any(post.link is link for post in self._posts)


class _Deferred:
    """A lane whose rows and outputs are on a device, over a link that gets them later."""

    def __init__(self, link: SLink, outbox: Outbox):
        self.link, self.outbox = link, outbox

    def send_plan(self, plan: Plan) -> None:
        """Announce the plan of the lane's next step."""
        self.link.send_plan(plan)

    def follow_plan(self, plan: Plan) -> None:
        """Take a plan that another S-rank's end announces."""
        self.link.follow_plan(plan)

    def answers_prompts(self, layer: int) -> bool:
        """Return whether the layer keeps a state."""
        return self.link.answers_prompts(layer)

    def Test(self) -> bool:
        """Return whether the R-ranks have done what was sent last."""
        self.outbox.send_ready()
        return not self.outbox.holds(self.link) and self.link.Test()

    def recv_output(self) -> None:
        """Let the link put o where it was told to."""
        self.link.recv_output()

    def take_swapped(self) -> list[tuple[int, bool]]:
        """Return what came of tickets."""
        return self.link.take_swapped()

    def close(self) -> None:
        """Complete what is under way after the stop plan."""
        self.link.close()


class StagedLink(_Deferred):
    """Over a link that takes rows and outputs in this host's memory."""

    def __init__(self, link: SLink, outbox: Outbox, copies: Copies):
        super().__init__(link, outbox)
        self.copies = copies
        self._memory: dict[int, Tensor] = {}  # pinned: of each part of rows, and of o
        self._decodes = self._answered = 0

    def send_plan(self, plan: Plan) -> None:
        """Announce the plan of the lane's next step."""
        self._decodes = len(plan.decode)
        super().send_plan(plan)

    def follow_plan(self, plan: Plan) -> None:
        """Take a plan that another S-rank's end announces."""
        self._decodes = len(plan.decode)
        super().follow_plan(plan)

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Copy rows to the host, and send them once they are there."""
        here = self._staged(rows)
        self._expect(layer, o)
        out = self._answer
        self._mark = self.copies.out(list(zip(here, rows, strict=True)))
        self.outbox.add(_Post(self.link, lambda: self.link.send_rows(layer, here, out), self._mark, rows))

    def send_away(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Copy rows to the host, and send them away once they are there."""
        here = self._staged(rows)
        mark = self.copies.out(list(zip(here, rows, strict=True)))
        self.outbox.add(_Post(self.link, lambda: self.link.send_away(layer, here), mark, rows))

    def _expect(self, layer: int, o: Tensor) -> None:
        self._target, self._answer = o, self._staged((o,), first=_OUTPUT)[0]
        self._answered = len(o) if self.answers_prompts(layer) else self._decodes

    def expect_output(self, layer: int, o: Tensor) -> None:
        """Expect the answer in host memory."""
        self._expect(layer, o)
        self._mark = self.copies.out([])
        self.outbox.add(_Post(self.link, lambda: self.link.expect_output(layer, self._answer), self._mark, ()))

    def recv_output(self) -> None:
        """Copy o to the device."""
        super().recv_output()
        if self._answered:
            rows = slice(self._answered)
            self.copies.into([(self._target[rows], self._answer[rows])], self._mark)

    def _staged(self, like: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Return host memory for each of `like`, that of the layer before: its answer has been copied on.

        Args:
            like: Tensors on the device.
            first: Place of the first of them.
        """
        found = []
        for i, x in enumerate(like, first):
            if i not in self._memory or self._memory[i].numel() < x.numel():
                self._memory[i] = self.copies.pinned(len(x) + len(x) // 4, x.shape[1], x.dtype)
            found.append(self._memory[i].flatten()[: x.numel()].view(x.shape))
        return found


class DirectLink(_Deferred):
    """Over a link that has its memory on the device."""

    def __init__(self, link: PackingLink, outbox: Outbox, queue: Queue):
        super().__init__(link, outbox)
        self.packing, self.queue = link, queue

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Let the device pack rows, and send them once it has."""
        mark = self.queue.tell(lambda: self.packing.pack(layer, rows, o))
        self.outbox.add(_Post(self.link, self.packing.send_packed, mark, rows))

    def send_away(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Let the device pack rows, and send them away once it has."""
        mark = self.queue.tell(lambda: self.packing.pack(layer, rows, rows[0]))
        self.outbox.add(_Post(self.link, self.packing.send_packed_away, mark, rows))

    def expect_output(self, layer: int, o: Tensor) -> None:
        """Expect the answer in memory of the device."""
        self.link.expect_output(layer, o)


def staged(links: Sequence[SLink], device: torch.device) -> Sequence[SLink]:
    """Return the lanes' links for tensors on `device`, over links that take them in this host's memory."""
    if device.type == "cpu":
        return links
    outbox, copies = Outbox(), CudaCopies(device)
    return [StagedLink(link, outbox, copies) for link in links]


def direct(links: Sequence[PackingLink], device: torch.device) -> Sequence[SLink]:
    """Return the lanes' links for tensors on `device`, over links that have their memory there."""
    outbox, queue = Outbox(), CudaQueue(device)
    return [DirectLink(link, outbox, queue) for link in links]
