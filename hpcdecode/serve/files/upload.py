"""Reads uploaded files as they arrive, from a form (multipart/form-data) to the disk, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio.to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from hpcdecode.requests.values import printable
from hpcdecode.serve.errors import ApiError
from hpcdecode.serve.files.store import BATCH, Draft, FileRecord, FileStore

if TYPE_CHECKING:
    from fastapi import Request
    from python_multipart.multipart import MultipartCallbacks

_FORM = "expected a form (multipart/form-data) with the fields purpose and file"
_FIELD_BYTES = 1 << 10  # of a field that is no file
FORM_BYTES = 1 << 16  # of a form around the file
_HEADER_BYTES = 1 << 12
_MOST_PARTS = 8


async def receive_file(request: Request, store: FileStore, owner: str, most_bytes: int) -> FileRecord:
    """Store the file of a request's form, and return it.

    Args:
        request: Whose body is read.
        store: Where the file goes.
        owner: Who it belongs to.
        most_bytes: Size that the file may have.

    Raises:
        ApiError: The form lacks something, has too much, or the file is too large.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, f"{_FORM}, got {printable(kind.decode('latin-1'))[:80] or 'no Content-Type'}")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > most_bytes + FORM_BYTES:
        raise _too_large(most_bytes)
    with store.draft(owner, BATCH) as draft:
        form = _Form(draft, most_bytes)
        try:
            parser = MultipartParser(options[b"boundary"], form.callbacks())
            async for chunk in request.stream():
                await anyio.to_thread.run_sync(parser.write, chunk)
            parser.finalize()
        except FormParserError as e:
            raise ApiError(400, f"{_FORM}, got another: {printable(e)[:200]}") from e
        form.check()
        return await anyio.to_thread.run_sync(draft.publish)


def _too_large(most_bytes: int) -> ApiError:
    message = (
        f"file: expected at most {most_bytes:,} bytes, got more; divide it, or start the server with a larger limit"
    )
    return ApiError(413, message, "file", "file_too_large")


def _longer(held: bytes, more: bytes) -> bytes:
    """Return a header that goes on."""
    if len(held) + len(more) > _HEADER_BYTES:
        raise ApiError(400, f"{_FORM}, got a header of more than {_HEADER_BYTES} bytes")
    return held + more


class _Form:
    """The fields of a form, and its file, which goes to a draft.

    Args:
        draft: The draft.
        most_bytes: Size that the file may have.
    """

    def __init__(self, draft: Draft, most_bytes: int):
        self._draft, self._most = draft, most_bytes
        self._fields: dict[str, bytearray] = {}
        self._parts = 0
        self._ended = self._has_file = False
        self._header = self._value = b""
        self._name: str | None = None  # of the part that is read; None for the file

    def callbacks(self) -> MultipartCallbacks:
        """Return what the parser of the form calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def check(self) -> None:
        """Raise ApiError unless the form is whole and has what it must have, and nothing else."""
        if not self._ended:
            raise ApiError(400, f"{_FORM}, got a part of one")
        if (purpose := bytes(self._fields.pop("purpose", b"")).decode(errors="replace")) != BATCH:
            got = repr(printable(purpose)) if purpose else "none"
            raise ApiError(400, f"purpose: expected {BATCH}, got {got}", "purpose")
        if not self._has_file:
            raise ApiError(400, "file: expected a file, got none", "file")
        for name in self._fields:
            raise ApiError(400, f"{printable(name)}: expected purpose and file, got this field; remove it", name)
        if not self._draft.record.bytes:
            raise ApiError(400, "file: expected a line for each request, got an empty file", "file")

    def _begin(self) -> None:
        self._parts += 1
        self._disposition = b""
        if self._parts > _MOST_PARTS:
            raise ApiError(400, f"{_FORM}, got more than {_MOST_PARTS}")

    def _begin_header(self) -> None:
        self._header = self._value = b""

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header = _longer(self._header, data[start:end])

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value = _longer(self._value, data[start:end])

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name in self._fields or (name == "file" and self._has_file):
            raise ApiError(400, f"{printable(name)}: expected it once, got it twice", name)
        if name != "file":
            self._name = name[:_FIELD_BYTES]
            self._fields[self._name] = bytearray()
            return
        self._name, self._has_file = None, True
        self._draft.name(options.get(b"filename", b"").decode(errors="replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None:
            field = self._fields[self._name]
            if len(field) + end - start > _FIELD_BYTES:
                raise ApiError(400, f"{printable(self._name)}: expected at most {_FIELD_BYTES} bytes, got more")
            field += data[start:end]
            return
        if self._draft.record.bytes + end - start > self._most:
            raise _too_large(self._most)
        self._draft.write(memoryview(data)[start:end])

    def _end(self) -> None:
        self._ended = True
