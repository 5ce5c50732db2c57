"""Opens prompt files: finds out what they are, and unpacks gzip and zstd, by their content."""

from __future__ import annotations

import gzip
import io
import os
import sys
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import msgspec

from hpcdecode.config import LITERAL, STDIN
from hpcdecode.data.prompts.content import GZIP, HEAD_BYTES, ZSTD, FileFormat, format_of
from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.prompts.standard_input import open_standard_input
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable

_BUFFER_BYTES = HEAD_BYTES


class _Unpacked(io.BufferedReader):
    """A file that is unpacked while it is read. Closing it closes the packed file, too."""

    def __init__(self, unpacked: Any, packed: io.BufferedReader) -> None:
        super().__init__(unpacked, _BUFFER_BYTES)
        self._packed_file = packed

    def close(self) -> None:
        """Close both files."""
        super().close()
        self._packed_file.close()


def is_once(path: str) -> bool:
    """Return whether what a path names can be read only once: standard input, or a pipe with a name."""
    return path == STDIN or not (path.startswith(LITERAL) or os.path.isfile(path))


def open_prompts(path: str) -> tuple[io.BufferedReader, FileFormat]:
    """Open a prompt file; return what it holds, unpacked, and its format.

    Args:
        path: A path, `-` for standard input, or a literal prompt.

    Raises:
        UserError: It is of a wrong kind, or a package is missing.
        Exception: It cannot be read, or is damaged.
    """
    if path.startswith(LITERAL):
        line = msgspec.json.encode({"prompt": unquote(path.removeprefix(LITERAL))})
        return io.BufferedReader(cast(Any, io.BytesIO(line))), FileFormat.LINES
    file: Any = open_standard_input() if path == STDIN else open(path, "rb", _BUFFER_BYTES)  # noqa: SIM115
    try:
        return _recognized(file, path)
    except BaseException:
        file.close()
        raise


def _recognized(file: io.BufferedReader, path: str) -> tuple[io.BufferedReader, FileFormat]:
    head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
    packed = _packing(head)
    if packed == "gzip":
        file = _Unpacked(gzip.GzipFile(fileobj=file, mode="rb"), file)
    elif packed == "zstd":
        file = _Unpacked(_open_zstd(file, path), file)
    form = format_of(file.peek(HEAD_BYTES)[:HEAD_BYTES] if packed else head, path)
    if form.is_table and (packed or not os.path.isfile(path)):
        got = f"one that is packed by {packed}; unpack it" if packed else "a pipe; give the name of a file"
        raise UserError(f"prompt file {printable(path)}: expected {form.value} in a file of its own, got {got}")
    return file, form


def _packing(head: bytes) -> str | None:
    if head.startswith(GZIP):
        return "gzip"
    return "zstd" if head.startswith(ZSTD) else None


def _open_zstd(file: BinaryIO, path: str) -> Any:
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return import_extra(name, path, "zstd").open(file, "rb")
