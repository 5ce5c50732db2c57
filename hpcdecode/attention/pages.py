"""Pages of a KV cache that is larger than its memory: which lie in frames of memory, and what comes in and goes out.

A page has the blocks of one range at one layer. Every page has a place in a tier. Layers attend in turn, step after
step, so that the page used last is needed last: it goes first, and the one whose use is longest ago comes in next. So a
part of the pages stays in memory, and only the rest moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.page_contents import Marks, Page, PageContents, PageWrite
from hpcdecode.attention.page_store import PageStore
from hpcdecode.errors import InvariantViolation, UserError

ABSENT, READING, RESIDENT, WRITING = range(4)


class PageCounts(msgspec.Struct):
    """What was moved.

    Attributes:
        bytes_in: Bytes that were read.
        bytes_out: Bytes that were written.
        seconds: Of the threads that move.
        waited: Seconds in which attention waited for pages.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    waited: float = 0.0


class Movers(Protocol):
    """What does moves beside attention: threads, or the clock of a simulation."""

    def move(self, move: Callable[[], int], done: Callable[[int], None]) -> None:
        """Have `move` called, then `done` with the bytes that it moved; the moves begin in the order of the calls."""

    def wait(self, changed: threading.Condition) -> None:
        """Wait until a move is done; `changed` is held."""

    def close(self) -> object:
        """End all moves."""


class Pages:
    """Decides which pages move between frames and tiers, and when. Its methods are called by one thread.

    Args:
        store: What moves their bytes.
        movers: What does that meanwhile; closed with the pages.

    Attributes:
        counts: Of what was moved.
    """

    def __init__(self, store: PageStore, movers: Movers):
        self._store, self._movers, self.counts = store, movers, PageCounts()
        sizes = self.sizes = store.sizes
        shape = sizes.layers, sizes.ranges
        self._state = np.full(shape, ABSENT, np.int8)
        self._frame = np.full(shape, -1, np.int32)
        self._pinned = np.zeros(shape, np.bool_)
        self._ahead = np.zeros(shape, np.bool_)  # came in, or comes, and was not used yet
        self._used_at = np.zeros(shape, np.int64)
        self._contents = PageContents(sizes, store.row_bytes)
        self._free = list(range(sizes.frames))[::-1]
        self._clock = 0
        self._reading = self._writing = 0
        self._problem = ""
        self._changed = threading.Condition()
        self.close = movers.close

    def set_live(self, live: Marks) -> None:
        """Say which blocks sequences hold; what others held is forgotten.

        Args:
            live: bool [ranges * range_blocks].
        """
        live = live.reshape(self._contents.live.shape)
        with self._changed:
            if self._contents.set_live(live):
                empty = (self._state == RESIDENT) & ~self._pinned & ~live.any(1)
                for layer, part in np.argwhere(empty).tolist():
                    self._drop(layer, part)

    def pin(self, layer: int, parts: Marks) -> None:
        """Have pages of a layer come in, and stay until `unpin`.

        Args:
            layer: Index of the layer.
            parts: bool [ranges], the ranges that are needed.
        """
        with self._changed:
            self._pinned[layer] |= parts
            self._ahead[layer] &= ~parts
            self._pump()

    def wait(self, layer: int, rows: Marks) -> Marks:
        """Wait until some rows have all their pages; return which, bool [n].

        Args:
            layer: Index of the layer.
            rows: bool [n, ranges], the ranges that each row needs, all of them pinned.

        Raises:
            UserError: If what a tier has cannot be read, or written.
        """
        begin = perf_counter()
        with self._changed:
            while not self._problem:
                able: Marks = ~np.logical_or.reduce(rows & (self._state[layer] != RESIDENT), axis=1)
                if able.any():
                    self.counts.waited += perf_counter() - begin
                    return able
                self._pump()
                self._movers.wait(self._changed)
            raise UserError(self._problem)

    def frames(self, layer: int) -> NDArray[np.int32]:
        """Return the frame of each page of a layer, or -1; int32 [ranges]. Those of pages that are pinned stay."""
        with self._changed:
            found: NDArray[np.int32] = np.where(self._state[layer] == RESIDENT, self._frame[layer], np.int32(-1))
            return found

    def wrote(self, layer: int, blocks: Sequence[int]) -> None:
        """Note that blocks of pinned pages were written."""
        with self._changed:
            self._contents.wrote(layer, blocks)

    def grew(self, layer: int, blocks: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Note that blocks of pinned pages grew by one token each, `tokens` of the blocks."""
        with self._changed:
            self._contents.grew(layer, blocks, tokens)

    def unpin(self, layer: int, parts: Marks) -> None:
        """Let pages of a layer go, which are needed again when all others have been."""
        with self._changed:
            self._clock += 1
            self._used_at[layer, parts] = self._clock
            self._pinned[layer] &= ~parts
            self._pump()

    def check(self) -> None:
        """Raise InvariantViolation unless every frame is free or has one page, and every block is somewhere."""
        with self._changed:
            held = self._frame[self._frame >= 0].tolist()
            if sorted([*held, *self._free]) != list(range(self.sizes.frames)):
                raise InvariantViolation(
                    "frames are free or have one page",
                    f"{len(held)} hold pages, {len(self._free)} are free of {self.sizes.frames}",
                )
            if lost := self._contents.lost(np.isin(self._state, (RESIDENT, WRITING))):
                raise InvariantViolation("blocks lie in memory or in a tier", f"{lost} lie in neither, or in both")

    def _pump(self) -> None:
        """Begin to move what should move next; the lock is held."""
        while not self._problem and (page := self._next()) is not None:
            if not self._free and not self._make_room(page):
                return
            self._frame[page] = self._free.pop()
            if not self._contents.has[page]:  # all its blocks are new
                self._state[page] = RESIDENT
                continue
            self._state[page], self._ahead[page] = READING, not self._pinned[page]
            self._reading += 1
            read = partial(self._store.read, page, int(self._frame[page]), self._contents.begin_reading(page))
            self._movers.move(partial(self._moved, read), partial(self._was_read, page))

    def _next(self) -> tuple[int, int] | None:
        """Return the page that comes in next, or None."""
        absent = self._state == ABSENT
        needed = np.argwhere(absent & self._pinned)
        if len(needed):
            fresh = [(i, j) for i, j in needed.tolist() if not self._contents.has[i, j]]
            if fresh or self._reading < self.sizes.window:
                i, j = fresh[0] if fresh else needed[0].tolist()
                return i, j
            return None
        if np.count_nonzero(self._ahead) >= self.sizes.window:
            return None
        due = absent & self._contents.has
        if not due.any():
            return None
        layer, part = np.unravel_index(np.where(due, self._used_at, np.iinfo(np.int64).max).argmin(), due.shape)
        return int(layer), int(part)

    def _make_room(self, page: tuple[int, int]) -> bool:
        """Free a frame for a page, by dropping another that is needed later; return False if it has to be written."""
        may = (self._state == RESIDENT) & ~self._pinned
        if not self._pinned[page]:
            may &= (self._used_at > self._used_at[page]) & ~self._ahead
        while may.any():
            at = np.unravel_index(np.where(may, self._used_at, -1).argmax(), may.shape)
            layer, part = int(at[0]), int(at[1])
            if not self._contents.unsaved((layer, part)):
                self._drop(layer, part)
                return True
            if self._writing >= self.sizes.window:
                return False
            self._state[layer, part] = WRITING
            self._writing += 1
            self._begin_writing((layer, part))
            if self._writing >= max(self.sizes.window // 2, 1):
                return False
            may[layer, part] = False
        return False

    def _drop(self, layer: int, part: int) -> None:
        """Take a page's frame; the lock is held."""
        self._free.append(int(self._frame[layer, part]))
        self._frame[layer, part] = -1
        self._state[layer, part], self._ahead[layer, part] = ABSENT, False

    def _was_read(self, page: Page, nbytes: int) -> None:
        """Take note that a page has come in."""
        with self._changed:
            self._reading -= 1
            self.counts.bytes_in += nbytes
            self._state[page] = RESIDENT
            if not self._pinned[page] and not self._contents.live[page[1]].any():
                self._drop(*page)
            self._pump()
            self._changed.notify_all()

    def _begin_writing(self, page: Page) -> None:
        """Have what changed of a page written; the lock is held."""
        given = self._contents.begin_writing(page)
        write = partial(self._store.write, page, int(self._frame[page]), given)
        self._movers.move(partial(self._moved, write), partial(self._was_written, page, given))

    def _was_written(self, page: Page, given: PageWrite, nbytes: int) -> None:
        """Take note that what changed of a page is in its tier; let the page go unless it is needed."""
        with self._changed:
            self._writing -= 1
            self.counts.bytes_out += nbytes
            self._state[page] = RESIDENT
            if not self._problem:
                self._contents.was_written(page, given)
                if not self._pinned[page]:
                    self._drop(*page)
            self._pump()
            self._changed.notify_all()

    def _moved(self, move: Callable[[], int]) -> int:
        """Return the bytes that `move` moved; note why if it could not. It is called beside other methods."""
        begin, nbytes, problem = perf_counter(), 0, ""
        try:
            nbytes = move()
        except OSError as error:
            problem = error.strerror or str(error)
        except Exception as error:  # the other thread waits for pages: it has to hear of it
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            self.counts.seconds += perf_counter() - begin
            if problem and not self._problem:
                self._problem = (
                    f"--kv-swap: pages of the KV cache cannot be moved: {problem}; rows that have ended are kept, "
                    "run the same command again to go on, with another tier if this one is broken"
                )
        return nbytes
