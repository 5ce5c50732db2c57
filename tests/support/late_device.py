"""A device of three streams whose work is done late, in memory of the host, in random order where none is settled.

Work is queued by stream. It is done when a mark behind it is reached, when work that must come behind it is done, or
by chance. Memory of the host that is copied to holds NaN until then. Memory of the device that is dropped holds NaN,
and copies under way see that. What is copied from or to must be memory that the device sees.
"""

from __future__ import annotations

import random
import weakref
from collections import deque

import numpy as np
import torch

from hpcdecode.exchange.staging import DeviceLink

POOL = 1 << 26  # bytes
NAN = float("nan")


class Work:
    """Work of one stream, behind other work."""

    def __init__(self, stream, do, after):
        self.stream, self.do, self.after, self.done = stream, do, after, False


class LateMark:
    """Is done once the device has come so far, which it has after `patience` tests at the latest."""

    def __init__(self, device, work, computed):
        self.device, self.work, self.computed, self.left = device, work, computed, device.patience

    def Test(self):
        self.left -= 1
        self.device.go_on()
        if self.left < 0:
            self.device.reach(self.work)
        return self.work.done


class LateMemory:
    """Memory of lanes: private, on the device or pinned, and what is shared, which is pinned.

    Args:
        device: That sees it.
        private: Whether what is not shared is on the device.
    """

    def __init__(self, device, private=False):
        self.device, self.private = device, private

    def empty(self, size, dtype):
        return self.device.empty(size, dtype) if self.private else self.device.pinned(1, size, dtype).flatten()

    def pin(self, address, nbytes):
        assert address not in self.device.registered, "pinned twice"
        self.device.registered[address] = nbytes

    def unpin(self, address):
        del self.device.registered[address]


class LateDevice:
    """A `Device`.

    Attributes:
        counts: Of what was told, by name.
        seen, registered: Memory that it sees, bytes by address: pinned by itself, or that others share.
        strict: Whether it copies to and from such memory alone.
    """

    def __init__(self, seed=0, patience=3):
        self.patience, self.random = patience, random.Random(seed)
        self.streams = {name: deque() for name in ("compute", "out", "in")}
        self.seen, self.registered, self.strict = {}, {}, True
        self.counts = dict.fromkeys(("tell", "out", "into", "copies", "upload", "empty"), 0)
        self._array = np.zeros(POOL, np.uint8)
        self._pool = torch.from_numpy(self._array)
        self._live = {}  # bytes of device memory by offset
        self._before_compute = []  # copies that computing must come behind

    def tell(self, work):
        self.counts["tell"] += 1
        after, self._before_compute = self._before_compute, []
        queued = self._queue("compute", work, after)
        return LateMark(self, queued, queued)

    def out(self, pairs):
        (mark,) = self.out_parts([pairs], self._computed())
        return mark

    def out_parts(self, parts, after):
        self.counts["out"] += 1
        marks = []
        for pairs in parts:
            raw = [(self._host(host), self._raw(there)) for host, there in pairs]
            for host, _ in raw:
                host.fill_(NAN)
            self.counts["copies"] += len(raw)
            queued = self._queue("out", lambda raw=raw: [to.copy_(source) for to, source in raw], [after.computed])
            marks.append(LateMark(self, queued, after.computed))
        return marks

    def into(self, pairs, after):
        self.counts["into"] += 1
        raw = [(self._raw(there), self._host(host)) for there, host in pairs]
        self.counts["copies"] += len(raw)

        def copy():
            for to, source in raw:
                to.copy_(source)
                source.fill_(NAN)

        self._before_compute.append(self._queue("in", copy, [after.computed]))

    def pinned(self, rows, columns, dtype):
        memory = torch.full((rows, columns), NAN, dtype=dtype)
        self.seen[memory.data_ptr()] = memory.nbytes
        return memory

    def empty(self, size, dtype):
        self.counts["empty"] += 1
        nbytes, at = max(size * dtype.itemsize, 1), 0
        for first, length in sorted(self._live.items()):
            if at + nbytes <= first:
                break
            at = -(-(first + length) // 64) * 64
        assert at + nbytes <= POOL, "the device has no memory left"
        self._live[at] = nbytes
        array = self._array[at : at + size * dtype.itemsize]
        weakref.finalize(array, self._drop, at)
        memory = torch.from_numpy(array).view(dtype)
        return memory.fill_(NAN)

    def upload(self, numbers):
        self.counts["upload"] += 1
        return torch.from_numpy(numbers.copy())

    def holds(self, memory):
        return 0 <= memory.data_ptr() - self._pool.data_ptr() < POOL

    def go_on(self):
        """Do some of what may be done, by chance."""
        for _ in range(self.random.randrange(3)):
            ready = [q for q in self.streams.values() if q and all(work.done for work in q[0].after)]
            if ready:
                self._do(self.random.choice(ready))

    def reach(self, work):
        """Do what comes before some work, and it."""
        while not work.done:
            queue = self.streams[work.stream]
            for before in queue[0].after:
                self.reach(before)
            self._do(queue)

    def finish(self):
        """Do all that computing waits for, as the host needs it where what is computed is on the host."""
        if queue := self.streams["compute"]:
            self.reach(queue[-1])

    def _do(self, queue):
        work = queue.popleft()
        work.do()
        work.done, work.do = True, None

    def _queue(self, stream, do, after):
        work = Work(stream, do, after)
        self.streams[stream].append(work)
        return work

    def _computed(self):
        return self.tell(lambda: None)

    def _drop(self, at):
        nbytes = self._live.pop(at)
        self._array[at : at + nbytes] = 0xFF  # NaN of every type of float

    def _raw(self, memory):
        """Memory of the device as an address, which does not keep it from being dropped."""
        if not self.holds(memory):
            return memory
        first = (memory.data_ptr() - self._pool.data_ptr()) // memory.element_size()
        return self._pool.view(memory.dtype).as_strided(memory.shape, memory.stride(), first)

    def _host(self, memory):
        """Memory of the host that the device sees, or its own."""
        first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        known = [*self.seen.items(), *self.registered.items()]
        seen = any(begin <= first and last <= begin + nbytes for begin, nbytes in known)
        assert seen or not self.strict or self.holds(memory), "copied from or to memory that is not pinned"
        return self._raw(memory)


class EmulatedLink(DeviceLink):
    """A lane whose slices are computed on the host at once: they need what the device has not done yet."""

    def recv_output(self):
        super().recv_output()
        self.device.finish()
