"""Files of a checkpoint that are mapped into memory."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path


class MappedFile:
    """A file that is mapped into memory, for as long as this object lives.

    Args:
        file: The file.
        owner: What holds the mapping.
        address: Returns the address of a byte of the mapping, or None if there is none.

    Attributes:
        file: The file.
    """

    def __init__(self, file: Path, owner: object, address: Callable[[], int | None]):
        self.file = file
        self._owner, self._address = owner, address
        self._addresses: range | None = None

    def forget_pages(self) -> None:
        """Take the file out of this process's memory. Pages that are used again are read again.

        The addresses are those of the mapping that is held. Others of the same file may be gone by the time that they
        are named, and memory of another kind, which cannot be read again, may have taken their place.
        """
        if self._addresses is None:
            self._addresses = self._find()
        if self._addresses:
            advise = ctypes.CDLL(None, use_errno=True).madvise
            advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            advise(self._addresses.start, len(self._addresses), mmap.MADV_DONTNEED)

    def _find(self) -> range:
        own, name = self._address(), str(self.file.resolve())
        found = (addresses for file, addresses in mapped_ranges() if file == name and own in addresses)
        return range(0) if own is None else next(found, range(0))


def mapped_ranges() -> list[tuple[str, range]]:
    """Return the files that this process has mapped into memory, with the addresses of each.

    Those of a mapping that nobody holds may be gone when this returns.
    """
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps if "/" in line]
    spans = ([int(address, 16) for address in span.split("-")] for span, *_ in lines)
    return [(line[5].rstrip(), range(*span)) for line, span in zip(lines, spans, strict=True)]


def in_checkpoints(places: Mapping[int, int]) -> dict[int, int]:
    """Return those of `places`, addresses in use, that lie in safetensors files that this process has mapped."""
    ranges = sorted((own.start, own.stop) for file, own in mapped_ranges() if file.endswith(".safetensors"))
    stops = [stop for _, stop in ranges] + [0]
    starts = [start for start, _ in ranges]
    return {at: value for at, value in places.items() if at < stops[bisect.bisect_right(starts, at) - 1]}
