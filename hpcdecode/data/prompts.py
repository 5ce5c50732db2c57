"""Rows of a JSON Lines prompt file, one at a time: a file of any size costs the memory of its longest line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from hpcdecode.data.fields import is_integer, row_params, shown, type_name
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.sampling.params import SamplingParams

MAX_LINE_BYTES = 64 << 20
MAX_ID_CHARACTERS = 4096
MAX_REASON_CHARACTERS = 500
MAX_TOKEN_ID = 2**31 - 1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SOURCES = ("prompt", "prompt_token_ids", "messages")
_CHUNK_BYTES = 1 << 20


class Row(msgspec.Struct):
    """One usable line. Exactly one of prompt, prompt_token_ids and messages is not None."""

    line: int  # 1-based
    id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    messages: list[dict] | None
    params: SamplingParams


class RowError(msgspec.Struct):
    """One line that cannot be used, and why."""

    line: int  # 1-based
    id: str  # the row's own id where it could be read, else the line number
    reason: str


def read_rows(path: str | os.PathLike, defaults: SamplingParams) -> Iterator[Row | RowError]:
    """Yield every line of `path` that is not blank, in order; a field of the row wins over `defaults`.

    The file is opened now and read once. Raises UserError where it cannot be opened or read; a line that cannot
    be used is yielded as a RowError.
    """
    try:
        file = open(path, "rb", buffering=_CHUNK_BYTES)  # noqa: SIM115 (_rows closes it)
    except OSError as e:
        raise UserError(f"prompt file {path}: expected a readable JSON Lines file, got: {e.strerror}") from e
    return _rows(file, path, defaults)


def row_error(line: int, row_id: str | None, reason: object) -> RowError:
    """A RowError whose reason is one line of bounded length."""
    text = " ".join(str(reason).split())
    if len(text) > MAX_REASON_CHARACTERS:
        text = text[: MAX_REASON_CHARACTERS - 3] + "..."
    return RowError(line=line, id=str(line) if row_id is None else row_id, reason=text)


def _rows(file: BinaryIO, path: str | os.PathLike, defaults: SamplingParams) -> Iterator[Row | RowError]:
    with file:
        try:
            for number, data in enumerate(_lines(file), start=1):
                if data is None:
                    yield row_error(
                        number, None, f"expected a line of at most {MAX_LINE_BYTES} bytes, got a longer one"
                    )
                elif data and not data.isspace():
                    yield _row(number, data, defaults)
        except OSError as e:
            raise UserError(f"prompt file {path}: reading failed: {e.strerror or e}") from e


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines as bytes; None for one that is too long, of which no more than the limit is ever held."""
    first = True
    while data := file.readline(MAX_LINE_BYTES + 1):
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = file.readline(_CHUNK_BYTES)
            data = None
        elif first:
            data = data.removeprefix(BYTE_ORDER_MARK)
        first = False
        yield data


def _row(line: int, data: bytes, defaults: SamplingParams) -> Row | RowError:
    row_id = None
    try:
        fields = _json_object(data)
        row_id = _row_id(fields, line)
        source = _source(fields)
        return Row(
            line=line,
            id=row_id,
            prompt=_prompt(fields) if source == "prompt" else None,
            prompt_token_ids=_token_ids(fields) if source == "prompt_token_ids" else None,
            messages=_messages(fields) if source == "messages" else None,
            params=row_params(fields, defaults),
        )
    except RowProblem as e:
        return row_error(line, row_id, e)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except UnicodeDecodeError as e:
        raise RowProblem(f"expected UTF-8 text, got invalid UTF-8: {e.reason}") from e
    except RecursionError as e:
        raise RowProblem("expected a JSON object, got one nested too deeply") from e
    except msgspec.DecodeError as e:
        raise RowProblem(f"expected a JSON object on one line, got invalid JSON: {e}") from e
    if not isinstance(value, dict):
        raise RowProblem(f"expected a JSON object, got {type_name(value)}")
    return value


def _row_id(fields: dict[str, Any], line: int) -> str:
    name = "id" if fields.get("id") is not None else "custom_id"
    value = fields.get(name)
    if value is None:
        return str(line)
    if not isinstance(value, str) and not is_integer(value):
        raise RowProblem(f"{name}: expected a string or an integer, got {type_name(value)} {shown(value)}")
    text = str(value)
    if "\0" in text or len(text) > MAX_ID_CHARACTERS:
        got = "a NUL character" if "\0" in text else f"{len(text)} characters"
        raise RowProblem(f"{name}: expected at most {MAX_ID_CHARACTERS} characters without NUL, got {got}")
    return text


def _source(fields: dict[str, Any]) -> str:
    given = [name for name in SOURCES if fields.get(name) is not None]
    if len(given) != 1:
        raise RowProblem(f"expected exactly one of {', '.join(SOURCES)}, got {' and '.join(given) or 'none of them'}")
    return given[0]


def _prompt(fields: dict[str, Any]) -> str:
    value = fields["prompt"]
    if not isinstance(value, str):
        raise RowProblem(f"prompt: expected a string, got {type_name(value)} {shown(value)}")
    if not value:
        raise RowProblem("prompt: expected a string that is not empty, got an empty one")
    return value


def _token_ids(fields: dict[str, Any]) -> list[int]:
    value = _filled_list(fields, "prompt_token_ids", "token ids")
    for index, token in enumerate(value):
        if not is_integer(token) or not 0 <= token <= MAX_TOKEN_ID:
            got = f"{type_name(token)} {shown(token)} at index {index}"
            raise RowProblem(f"prompt_token_ids: expected integers in [0, {MAX_TOKEN_ID}], got {got}")
    return value


def _messages(fields: dict[str, Any]) -> list[dict]:
    value = _filled_list(fields, "messages", "messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowProblem(f"messages[{index}]: expected an object, got {type_name(message)} {shown(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RowProblem(f"messages[{index}].role: expected a string, got {type_name(role)} {shown(role)}")
        if content is not None and not isinstance(content, (str, list)):
            got = f"{type_name(content)} {shown(content)}"
            raise RowProblem(f"messages[{index}].content: expected a string or a list of parts, got {got}")
    return value


def _filled_list(fields: dict[str, Any], name: str, what: str) -> list:
    value = fields[name]
    if not isinstance(value, list):
        raise RowProblem(f"{name}: expected a list of {what}, got {type_name(value)} {shown(value)}")
    if not value:
        raise RowProblem(f"{name}: expected at least one element, got an empty list")
    return value
