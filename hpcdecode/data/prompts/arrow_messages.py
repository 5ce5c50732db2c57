"""The messages of an Arrow file: what their metadata claim, read before any of it is believed.

The format is the IPC format of Arrow: a stream of messages with metadata in FlatBuffers. A file is such a stream
between two magic words.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcdecode.data.prompts.content import ARROW_FILE
from hpcdecode.data.prompts.extras import import_extra

_MAX_UNPACKED_BYTES = 4 << 30  # of a batch that is packed
_MAX_RATIO = 100  # of its size to the bytes stored, if it is larger than the next one
_MAX_ANY_RATIO_BYTES = 1 << 30
_DICTIONARY, _BATCH = 2, 3  # kinds of messages that have rows or values


class BatchClaim(NamedTuple):
    """What the metadata of a message say about its rows.

    Attributes:
        rows: Number of rows; 0 for values of a dictionary.
        unpacked: Bytes of its buffers that are packed, after unpacking; 0 if none are.
        stored: Bytes that are stored.
    """

    rows: int
    unpacked: int
    stored: int


def open_arrow(path: str) -> Any:
    """Return a memory map of a file, at the beginning of its messages.

    Raises:
        UserError: pyarrow is not installed.
        ValueError: The file has no end.
    """
    file = import_extra("pyarrow", path, "parquet").memory_map(path, "r")
    if file.read(len(ARROW_FILE)) == ARROW_FILE:
        file.seek(max(os.path.getsize(path) - len(ARROW_FILE.strip(b"\0")), 0))
        if file.read() != ARROW_FILE.strip(b"\0"):
            raise ValueError("an Arrow file without its end")
        file.seek(len(ARROW_FILE))
    else:
        file.seek(0)
    return file


def batch_claims(path: str) -> Iterator[BatchClaim]:
    """Yield what the messages of a file claim.

    Raises:
        UserError: pyarrow is not installed.
        ValueError: The metadata are damaged.
        Exception: pyarrow raises exceptions of many types.
    """
    reader = import_extra("pyarrow.ipc", path, "parquet").MessageReader.open_stream(open_arrow(path))
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        body = message.body
        try:
            yield _claim(memoryview(message.metadata), memoryview(body) if body is not None else memoryview(b""))
        except (struct.error, IndexError) as error:
            raise ValueError("damaged metadata of an Arrow file") from error


def check_claims(path: str) -> None:
    """Raise ValueError if a message claims far more than the file can hold."""
    most_rows = 8 * os.path.getsize(path)  # a bit each
    for claim in batch_claims(path):
        if not 0 <= claim.rows <= most_rows:
            raise ValueError(f"a batch of {claim.rows} rows in a file of {most_rows // 8} bytes")
        implausible = claim.unpacked > max(_MAX_ANY_RATIO_BYTES, _MAX_RATIO * claim.stored)
        if implausible or claim.unpacked > _MAX_UNPACKED_BYTES:
            raise ValueError(
                f"a batch of {claim.unpacked} bytes of which {claim.stored} are stored; write smaller ones"
            )


def _claim(metadata: memoryview, body: memoryview) -> BatchClaim:
    message = _FlatTable(metadata, _unsigned(metadata, 0))
    kind_at, header_at = message.field(1), message.field(2)
    kind = metadata[kind_at] if kind_at else 0
    if kind not in (_DICTIONARY, _BATCH) or not header_at:
        return BatchClaim(0, 0, len(body))
    batch = _FlatTable(metadata, header_at + _unsigned(metadata, header_at))
    if kind == _DICTIONARY:
        data_at = batch.field(1)
        if not data_at:
            return BatchClaim(0, 0, len(body))
        batch = _FlatTable(metadata, data_at + _unsigned(metadata, data_at))
    rows_at = batch.field(0)
    rows = struct.unpack_from("<q", metadata, rows_at)[0] if rows_at and kind == _BATCH else 0
    return BatchClaim(rows, _unpacked(batch, metadata, body), len(body))


def _unpacked(batch: _FlatTable, metadata: memoryview, body: memoryview) -> int:
    """Return the bytes of a batch's buffers after unpacking; each begins with its size, -1 if it is not packed."""
    buffers_at, packed = batch.field(2), batch.field(3)
    if not buffers_at or not packed:
        return 0
    start = buffers_at + _unsigned(metadata, buffers_at)
    total = 0
    for number in range(_unsigned(metadata, start)):
        offset, size = struct.unpack_from("<qq", metadata, start + 4 + 16 * number)
        if size >= 8:
            if offset < 0:
                raise ValueError("damaged metadata of an Arrow file")
            total += max(struct.unpack_from("<q", body, offset)[0], 0)
    return total


class _FlatTable:
    """A table of FlatBuffers: fields at offsets that its vtable lists."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        if self._vtable < 0:
            raise ValueError("damaged metadata of an Arrow file")
        (self._size,) = struct.unpack_from("<H", data, self._vtable)

    def field(self, index: int) -> int:
        """Return where a field is, or 0 if the table has none of this index."""
        entry = 4 + 2 * index
        if entry + 2 > self._size:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._vtable + entry)
        return self._at + offset if offset else 0


def _unsigned(data: memoryview, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value
