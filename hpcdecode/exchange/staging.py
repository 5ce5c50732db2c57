"""Links whose rows and outputs are on a device: it packs what a lane sends, and copies it to where it is sent from.

Every parcel goes on as soon as the device has come so far. Until then other lanes go on, and whoever waits looks after
it. Copies run beside the device's computing. There are none where MPI takes the memory of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hpcdecode.exchange.base import Parcel, ParcelLink, SLink
from hpcdecode.exchange.device import Accelerator, CudaDevice
from hpcdecode.exchange.device_packing import Images, LayerImages
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan


class _Post:
    """What a lane is to send, and what must have been done before.

    Args:
        link: that it goes over.
        send: sends it.
        mark: is done once it may be sent.
    """

    def __init__(self, link: SLink, send: Callable[[], None], mark: Waitable):
        self.link, self.send, self.mark = link, send, mark


class Outbox:
    """What all lanes of an S-rank have not sent yet, in the order in which it was made.

    Attributes:
        links: of the lanes.
    """

    def __init__(self) -> None:
        self.links: list[ParcelLink] = []
        self._posts: deque[_Post] = deque()

    def add(self, posts: Sequence[_Post]) -> None:
        """Take posts; send what is ready."""
        self._posts.extend(posts)
        self.send_ready()

    def send_ready(self) -> None:
        """Send what the device has done; if that is nothing, let what was sent before go on."""
        sent = False
        while self._posts and self._posts[0].mark.Test():
            self._posts.popleft().send()
            sent = True
        if self._posts and not sent:
            for link in self.links:
                link.poke()

    def holds(self, link: SLink) -> bool:
        """Return whether something for `link` has not been sent."""
        return any(post.link is link for post in self._posts)


class _Emptied:
    """Is done once an outbox holds nothing for a link."""

    def __init__(self, outbox: Outbox, link: SLink):
        self.outbox, self.link = outbox, link

    def Test(self) -> bool:
        self.outbox.send_ready()
        return not self.outbox.holds(self.link)


class DeviceLink:
    """A lane whose rows and outputs are on a device.

    Args:
        link: That it goes over, whose memory is on this host or on the device.
        outbox: Of the S-rank's lanes.
        device: Of rows and outputs.
    """

    def __init__(self, link: ParcelLink, outbox: Outbox, device: Accelerator):
        self.link, self.outbox, self.device = link, outbox, device
        outbox.links.append(link)
        self._images = Images(device)
        self._by_shape: dict[object, LayerImages] = {}

    def send_plan(self, plan: Plan) -> None:
        """Announce the plan of the lane's next step."""
        self._by_shape = {}
        self.link.send_plan(plan)

    def follow_plan(self, plan: Plan) -> None:
        """Take a plan that another S-rank's end announces."""
        self._by_shape = {}
        self.link.follow_plan(plan)

    def answers_prompts(self, layer: int) -> bool:
        """Return whether the layer keeps a state."""
        return self.link.answers_prompts(layer)

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Let the device pack rows, and send each parcel once it is where it is sent from."""
        self._target = o
        self._pack(layer, rows, self.link.exchange)

    def send_away(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Let the device pack rows, and send them away."""
        self._pack(layer, rows, self.link.send)

    def expect_output(self, layer: int, o: Tensor) -> None:
        """Expect the answers, once the memory for them has been read."""
        self._target, self._layer = o, self._begin(layer, o.dtype)
        self._mark = self.device.tell(_nothing)
        self._add([(partial(self.link.expect, parcel), self._mark) for parcel in self._layer.parcels])

    def _pack(self, layer: int, rows: Sequence[Tensor], finish: Callable[[Parcel], None]) -> None:
        self._layer = images = self._begin(layer, rows[0].dtype)
        self._mark = self.device.tell(partial(images.gather, rows))
        marks: Sequence[Waitable] = [self._mark] * len(images.parcels)
        if images.parts is not None:
            marks = self.device.out_parts(images.parts, self._mark)
        self._add([(partial(finish, parcel), mark) for parcel, mark in zip(images.parcels, marks, strict=True)])

    def _begin(self, layer: int, dtype: torch.dtype) -> LayerImages:
        """Take up a layer once all of the last one has been sent; in a step's first layer send its places."""
        wait(_Emptied(self.outbox, self.link))
        self.link.begin(layer)
        if not self._by_shape:
            self._prepare(dtype)
        return self._by_shape[self.link.shapes[layer]]

    def _prepare(self, dtype: torch.dtype) -> None:
        """Settle how the layers of each shape cross, and send the places of their rows to the device at once."""
        shapes = self.link.shapes
        for shape in dict.fromkeys(shapes):
            parcels = self.link.parcels(shapes.index(shape), dtype)
            self._by_shape[shape] = LayerImages(parcels, shape, self._images, dtype)
        LayerImages.upload_all(list(self._by_shape.values()), self.device)

    def _add(self, sends: Sequence[tuple[Callable[[], None], Waitable]]) -> None:
        self.outbox.add([_Post(self.link, send, mark) for send, mark in sends])

    def Test(self) -> bool:
        """Return whether the R-ranks have done what was sent last."""
        self.outbox.send_ready()
        return not self.outbox.holds(self.link) and self.link.Test()

    def recv_output(self) -> None:
        """Copy what R-ranks answered to the device, which puts it where it belongs."""
        self.link.take_answers()
        if len(self._layer.answers):
            if self._layer.back:
                self.device.into(self._layer.back, self._mark)
            self.device.tell(partial(self._layer.scatter, self._target))

    def take_swapped(self) -> list[tuple[int, bool]]:
        """Return what came of tickets."""
        return self.link.take_swapped()

    def close(self) -> None:
        """Complete what is under way after the stop plan."""
        self._by_shape = {}
        self.link.close()


def _nothing() -> None:
    """Compute nothing."""


def staged(links: Sequence[ParcelLink], device: torch.device) -> Sequence[SLink]:
    """Return the lanes' links for tensors on `device`."""
    if device.type == "cpu":
        return links
    outbox, own = Outbox(), CudaDevice(device)
    return [DeviceLink(link, outbox, own) for link in links]
