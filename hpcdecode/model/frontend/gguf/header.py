"""The header of a GGUF file, which is untrusted: every count, size and offset is checked before it is used.

Source: the specification of GGUF, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from hpcdecode.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_TENSORS, MOST_VALUES, MOST_NAME = 1 << 20, 1 << 16, 1 << 12
MOST_DIMENSIONS, MOST_ELEMENTS, MOST_ALIGNMENT = 4, 1 << 48, 1 << 20
MOST_ARRAY = 1 << 24  # elements, such as the tokens of a vocabulary
KEPT_ARRAY = 1 << 12  # elements; longer arrays are skipped, and so are those of text
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
F32 = 0  # number of the block type
ALIGNMENT = 32


class GgufEntry(NamedTuple):
    """A tensor in the table of a GGUF file.

    Attributes:
        name: Its name.
        shape: Its shape in torch's order, rows first.
        type: Number of its block type.
        first: Byte of the file at which it begins.
        nbytes: Its size.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    first: int
    nbytes: int


class GgufHeader(NamedTuple):
    """What a GGUF file states before its tensors.

    Attributes:
        file: The file.
        values: Metadata by key. Of an array of text, or a long one, only the number of its elements is kept.
        tensors: Tensors by name.
        nbytes: Size of the header.
    """

    file: Path
    values: dict[str, Any]
    tensors: dict[str, GgufEntry]
    nbytes: int


class WrongHeaderError(ValueError):
    """A header cannot be right. The text says what was expected, and what came."""


class Cursor:
    """Reads values one after the other, none beyond the end.

    Args:
        data: Content of the file.

    Attributes:
        at: Byte that is read next.
    """

    def __init__(self, data: mmap.mmap):
        self._data, self._size, self.at = data, len(data), 0

    def number(self, form: str) -> Any:
        """Return the number of a format of `struct`."""
        first = self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, first)[0]

    def count(self, what: str, most: int) -> int:
        """Return an unsigned number of 64 bits, which counts `what`."""
        found = self.number("<Q")
        if found > most:
            raise WrongHeaderError(f"expected at most {most:,} {what}, got {found:,}")
        return int(found)

    def skip(self, nbytes: int) -> int:
        """Pass over bytes, and return where they begin."""
        first = self.at
        if nbytes > self._size - first:
            raise WrongHeaderError(f"expected {nbytes:,} more bytes at byte {first:,}, the file ends at {self._size:,}")
        self.at += nbytes
        return first

    def text(self, most: int) -> str:
        """Return a text of at most `most` bytes."""
        nbytes = self.count("bytes of a text", most)
        first = self.skip(nbytes)
        return self._data[first : first + nbytes].decode("utf-8")

    def value(self, kind: int) -> Any:
        """Return a value of metadata of a type, or the number of elements of an array that is not kept."""
        if kind == TEXT:
            return self.text(self._size)
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise WrongHeaderError(f"expected a type of metadata from 0 to 12, got {kind}")
        return self.number(SCALARS[kind])

    def array(self) -> Any:
        """Return the elements of an array, or their number."""
        kind, count = self.number("<I"), self.count("elements of an array", MOST_ARRAY)
        if kind == TEXT:
            for _ in range(count):
                self.skip(self.count("bytes of a text", self._size))
            return count
        if kind not in SCALARS:
            raise WrongHeaderError(f"expected an array of numbers or texts, got type {kind}")
        if count > KEPT_ARRAY:
            self.skip(count * struct.calcsize(SCALARS[kind]))
            return count
        return [self.number(SCALARS[kind]) for _ in range(count)]


def read_header(file: Path, sizes: dict[int, tuple[int, int]]) -> GgufHeader:
    """Read the header of a GGUF file.

    Args:
        file: The file.
        sizes: Elements and bytes of a block, by the number of its type.

    Raises:
        UserError: If it is truncated, damaged or another kind of file, or has blocks of an unknown type.
    """
    try:
        if not file.is_file():
            raise UserError(f"model file {file} does not exist, or is not a regular file: give a GGUF file")
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parsed(file, data, sizes)
    except (OSError, ValueError) as e:
        raise UserError(f"{file} is truncated or not a GGUF file: {e}; copy or download it again") from e


def parsed(file: Path, data: mmap.mmap, sizes: dict[int, tuple[int, int]]) -> GgufHeader:
    """Return the header in `data`, the content of `file`. Raise ValueError if it cannot be right."""
    cursor = Cursor(data)
    first = cursor.skip(len(MAGIC))
    if (came := data[first : first + len(MAGIC)]) != MAGIC:
        raise WrongHeaderError(f"expected it to begin with {MAGIC!r}, got {came!r}")
    if (version := cursor.number("<I")) not in VERSIONS:
        raise WrongHeaderError(f"expected version 2 or 3 in little-endian order, got {version}")
    tensors, values = cursor.count("tensors", MOST_TENSORS), cursor.count("values of metadata", MOST_VALUES)
    found: dict[str, Any] = {}
    for _ in range(values):
        key = cursor.text(MOST_NAME)
        if key in found:
            raise WrongHeaderError(f"expected one value {key!r:.100}, got two")
        found[key] = cursor.value(cursor.number("<I"))
    rows = [entry(cursor, sizes) for _ in range(tensors)]
    return GgufHeader(file, found, placed(rows, cursor.at, alignment_of(found), len(data)), cursor.at)


def entry(cursor: Cursor, sizes: dict[int, tuple[int, int]]) -> GgufEntry:
    """Read a tensor of the table, whose place is counted from the end of the header."""
    name, dimensions = cursor.text(MOST_NAME), cursor.number("<I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise WrongHeaderError(f"tensor {name!r:.100}: expected 1 to 4 dimensions, got {dimensions}")
    sides = [cursor.number("<Q") for _ in range(dimensions)]
    kind, first = cursor.number("<I"), cursor.number("<Q")
    if not 0 < math.prod(sides) <= MOST_ELEMENTS:
        raise WrongHeaderError(f"tensor {name!r:.100}: expected 1 to 2^48 elements, got the shape {sides[::-1]}")
    if kind not in sizes:
        raise WrongHeaderError(f"tensor {name!r:.100}: expected a block type that can be dequantised, got {kind}")
    elements, nbytes = sizes[kind]
    if sides[0] % elements:
        raise WrongHeaderError(f"tensor {name!r:.100}: expected rows of blocks of {elements}, got {sides[0]} columns")
    return GgufEntry(name, tuple(sides[::-1]), kind, first, math.prod(sides) // elements * nbytes)


def alignment_of(values: dict[str, Any]) -> int:
    """Return the number of bytes that tensors begin at multiples of."""
    found = values.get("general.alignment", ALIGNMENT)
    if type(found) is not int or not 0 < found <= MOST_ALIGNMENT or found & (found - 1):
        raise WrongHeaderError(f"general.alignment: expected a power of two up to {MOST_ALIGNMENT:,}, got {found!r}")
    return found


def placed(rows: list[GgufEntry], header: int, alignment: int, size: int) -> dict[str, GgufEntry]:
    """Return tensors by name, at their places in a file.

    Args:
        rows: Tensors whose places are counted from the end of the header.
        header: Size of the header in bytes.
        alignment: Tensors begin at multiples of this number of bytes.
        size: Size of the file in bytes.
    """
    begin, found = -(-header // alignment) * alignment, dict[str, GgufEntry]()
    for row in rows:
        first = begin + row.first
        if row.name in found:
            raise WrongHeaderError(f"expected one tensor {row.name!r:.100}, got two")
        if row.first % alignment or first + row.nbytes > size:
            raise WrongHeaderError(
                f"tensor {row.name!r:.100}: expected {row.nbytes:,} bytes at a multiple of {alignment} bytes before "
                f"the end at {size:,}, got them at {first:,}"
            )
        found[row.name] = row._replace(first=first)
    return found
