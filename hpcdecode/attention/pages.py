"""Pages of a KV cache that is larger than its memory: what decides is native, what moves them is threads.

A page has the blocks of one range at one layer. Every page has a place in a tier. `PageTable` says which pages come in
and go out, and what of them moves; here its moves are handed to threads, or to the clock of a simulation.
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

from hpcdecode._attn_cpu import KvCache, PageMove, PageTable
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.page_store import PageStore
from hpcdecode.errors import InvariantViolation, UserError
from hpcdecode.system.swap_tiers import ALIGNMENT

Marks = NDArray[np.bool_]
_BYTES = np.dtype(np.uint8)


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


def page_table(sizes: PageSizes, row_bytes: Sequence[int]) -> PageTable:
    """Return the table of pages that are all absent.

    Args:
        sizes: Of pages.
        row_bytes: Bytes of a token at every layer.
    """
    return PageTable(
        sizes.ranges,
        sizes.range_blocks,
        sizes.block_tokens,
        sizes.block_bytes,
        sizes.journal_bytes,
        ALIGNMENT,
        list(row_bytes),
        sizes.frames,
        sizes.window,
    )


class Pages:
    """Has pages moved between frames and tiers. Its methods are called by one thread.

    Args:
        store: What moves their bytes.
        movers: What does that meanwhile; closed with the pages.

    Attributes:
        sizes: Of pages.
        counts: Of what was moved.
    """

    def __init__(self, store: PageStore, movers: Movers):
        self._store, self._movers, self.counts = store, movers, PageCounts()
        self.sizes = store.sizes
        self._table = page_table(self.sizes, store.row_bytes)
        self._problem = ""
        self._changed = threading.Condition()
        self.close = movers.close

    @property
    def any_pinned(self) -> bool:
        """Return whether any page has to stay."""
        return self._table.any_pinned

    def set_live(self, live: NDArray[np.uint8]) -> None:
        """Say which blocks sequences hold; what others held is forgotten.

        Args:
            live: uint8 [ranges * range_blocks], 1 or 0.
        """
        with self._changed:
            self._table.set_live(live)

    def pin(self, layer: int, parts: Marks) -> None:
        """Have pages of a layer come in, and stay until `unpin`.

        Args:
            layer: Index of the layer.
            parts: bool [ranges], the ranges that are needed.
        """
        with self._changed:
            if not self._problem:
                self._begin(self._table.pin(layer, parts.view(_BYTES)))

    def wait(self, layer: int, rows: Marks) -> Marks:
        """Wait until some rows have all their pages; return which, bool [n].

        Args:
            layer: Index of the layer.
            rows: bool [n, ranges], the ranges that each row needs, all of them pinned.

        Raises:
            UserError: If what a tier has cannot be read, or written.
        """
        needs, able = rows.reshape(-1).view(_BYTES), np.empty(len(rows), np.bool_)
        found = able.view(_BYTES)
        begin = perf_counter()
        with self._changed:
            while not self._problem:
                if self._table.find_able(layer, needs, found):
                    self.counts.waited += perf_counter() - begin
                    return able
                self._movers.wait(self._changed)
            raise UserError(self._problem)

    def place(self, layer: int, native: KvCache) -> None:
        """Tell a KV cache in which frames the pages of a layer lie. Those of pages that are pinned stay."""
        with self._changed:
            self._table.place(native, layer)

    def frames(self, layer: int) -> list[int]:
        """Return the frame of each page of a layer, or -1."""
        with self._changed:
            return self._table.frames(layer)

    def wrote(self, layer: int, blocks: list[int]) -> None:
        """Note that blocks of pinned pages were written."""
        with self._changed:
            self._table.wrote(layer, blocks)

    def grew(self, layer: int, blocks: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Note that blocks of pinned pages grew by one token each, `tokens` of the blocks."""
        with self._changed:
            self._table.grew(layer, blocks, tokens)

    def unpin(self, layer: int, parts: Marks) -> None:
        """Let pages of a layer go, which are needed again when all others have been."""
        with self._changed:
            begun = self._table.unpin(layer, parts.view(_BYTES))
            if not self._problem:
                self._begin(begun)

    def check(self) -> None:
        """Raise InvariantViolation unless every frame is free or has one page, and every block is somewhere."""
        with self._changed:
            if broken := self._table.broken():
                raise InvariantViolation(*broken.split(": ", 1))

    def _begin(self, moves: Sequence[PageMove]) -> None:
        """Have moves made; the lock is held."""
        for move in moves:
            self._movers.move(partial(self._moved, move), partial(self._was_moved, move))

    def _was_moved(self, move: PageMove, nbytes: int) -> None:
        """Take note that a page has come in, or is in its tier."""
        with self._changed:
            if move.writes:
                self.counts.bytes_out += nbytes
            else:
                self.counts.bytes_in += nbytes
            if not self._problem:
                self._table.was_moved(move)
                self._begin(self._table.pump())
            self._changed.notify_all()

    def _moved(self, move: PageMove) -> int:
        """Return the bytes that were moved; note why if they could not be. It is called beside other methods."""
        begin, nbytes, problem = perf_counter(), 0, ""
        try:
            nbytes = self._store.write(move) if move.writes else self._store.read(move)
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
