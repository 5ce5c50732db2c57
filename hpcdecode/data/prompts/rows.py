"""Rows of the prompt files: parses and checks each row, and says why one cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any

import msgspec

from hpcdecode.data.prompts.batch_format import LINE_FIELDS, is_request, request_fields
from hpcdecode.data.prompts.continuations import (
    CONTINUATIONS,
    SCORING_PARAMS,
    TEXT,
    Continuations,
    continuations_of,
    prompt_of_scored,
    with_prompt,
)
from hpcdecode.data.prompts.doubts import RepeatedIds, UnknownRoles
from hpcdecode.data.prompts.fields import (
    LORA,
    OPENAI_LOGPROBS,
    OPENAI_MAX_TOKENS,
    RESPONSE_FORMAT,
    UNSUPPORTED,
    adapter_of,
    row_params,
)
from hpcdecode.data.prompts.files import MAX_LINE_BYTES, RawData, RawRow, raw_rows
from hpcdecode.data.prompts.kept import ALL, SEARCHED_ROWS, KeptColumns, Selection
from hpcdecode.data.prompts.messages import CHAT_FIELDS, DEFAULT_CHAT, ChatOptions, chat_options
from hpcdecode.data.prompts.opening import is_once
from hpcdecode.data.prompts.row_sources import messages_of, renamed, source_of, text_of, token_ids_of
from hpcdecode.data.prompts.row_template import SOURCES, RowTemplate
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import SamplingParams, sampling_kinds
from hpcdecode.requests.values import is_integer, printable, shown, type_name

MAX_ID_CHARACTERS = 4096
MAX_REASON_CHARACTERS = 500


class Row(msgspec.Struct):
    """A row that can be used. Exactly one of prompt, prompt_token_ids and messages is not None."""

    line: int  # counted from 1 through all files
    id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    chat: ChatOptions = DEFAULT_CHAT  # options for rendering the messages
    rendered: str | None = None  # text of the messages, once they are rendered
    scored: Continuations | None = None  # what is scored; None if text is generated
    adapter: int = -1  # number of the adapter that it chooses; -1 for none
    lora: str = ""  # its name; empty for none


class RowError(msgspec.Struct):
    """A row that cannot be used, and the reason."""

    line: int  # counted from 1 through all files
    id: str  # the row's own id if it could be read, else the line number
    reason: str
    columns: bytes = b""  # that are kept of the row, packed (see columns.py)


def read_rows(
    files: Sequence[str],
    defaults: SamplingParams,
    *,
    column: str | None = None,
    model: str | None = None,
    limit: int | None = None,
    wanted: Callable[[int], bool] | None = None,
    kept: KeptColumns | None = None,
    template: RowTemplate | None = None,
    quiet: bool = False,
    score: bool = False,
    adapters: Sequence[str] | None = (),
) -> Iterator[Row | RowError]:
    """Return an iterator over the rows of files, in order, without blank lines.

    A row that cannot be used becomes a RowError. The first file is opened now; each file is read once.

    Args:
        files: Paths, or `-` for standard input.
        defaults: The job's sampling parameters, which the fields of a row replace.
        column: Name of the column that holds the prompts; None for the usual names.
        model: Directory of the job's model, which requests of the batch format may name. None accepts any name.
        limit: Number of rows to read at most; None for all.
        wanted: Returns whether a row is to be yielded, by its number; None for all.
        kept: Keeps the columns of rows that are yielded; None keeps none.
        template: Makes prompts of columns; None if rows have prompts.
        quiet: Whether no warnings are logged.
        score: Whether rows are scored, and may have continuations.
        adapters: Names of the adapters that rows may choose; None accepts any, where nothing is generated.

    Raises:
        UserError: A file cannot be opened or read.
    """
    reader = RowReader(column, model, kept, template, RepeatedIds, score=score, adapters=adapters)
    reader.unknown.quiet = quiet
    rows = islice(raw_rows(files, column, reader.unknown), limit)
    found = (reader.read(raw, defaults) for raw in rows if wanted is None or wanted(raw.number))
    return found if kept is None else _ended(found, kept)


def _ended(rows: Iterator[Row | RowError], kept: KeptColumns) -> Iterator[Row | RowError]:
    """Yield rows, and say when there are no more."""
    yield from rows
    kept.end()


def require_columns(
    files: Sequence[str],
    selection: Selection,
    column: str | None,
    template: RowTemplate | None = None,
    score: bool = False,
) -> None:
    """Raise UserError unless the first rows of the files have the columns of a selection. Pipes are not read.

    Raises:
        UserError: A file cannot be read, too.
    """
    found: dict[str, None] = {}
    for path in () if any(map(is_once, files)) else files:
        reader = RowReader(column, kept=KeptColumns(Selection(ALL, column)), template=template, score=score)
        unknown = reader.unknown
        unknown.quiet = True  # it is said when the rows are read
        for raw in islice(raw_rows([path], column, unknown), SEARCHED_ROWS):
            with suppress(RowProblem):
                found.update(dict.fromkeys(row_fields(raw.data)))
            if not selection.lacks(found):
                return
    if found:
        selection.require(found)


def row_error(line: int, row_id: str | None, reason: object) -> RowError:
    """Return a RowError whose reason is cut to one line of at most MAX_REASON_CHARACTERS."""
    text = printable(" ".join(str(reason)[: 4 * MAX_REASON_CHARACTERS].split()))
    if len(text) > MAX_REASON_CHARACTERS:
        text = text[: MAX_REASON_CHARACTERS - 3] + "..."
    return RowError(line=line, id=str(line) if row_id is None else row_id, reason=text)


class RowReader:
    """Parses and checks rows.

    Args:
        column: Name of the column that holds the prompts; None for the usual names.
        model: Directory of the job's model, which requests of the batch format may name. None accepts any name.
        kept: Keeps the columns of rows; None keeps none.
        template: Makes prompts of columns; None if rows have prompts.
        ids: Class that warns about ids that repeat; None if they may.
        score: Whether rows are scored, and may have continuations.
        adapters: Names of the adapters that rows may choose; None accepts any, where nothing is generated.

    Attributes:
        unknown: Warns about fields with unknown names.
    """

    def __init__(
        self,
        column: str | None = None,
        model: str | None = None,
        kept: KeptColumns | None = None,
        template: RowTemplate | None = None,
        ids: type[RepeatedIds] | None = None,
        *,
        score: bool = False,
        adapters: Sequence[str] | None = (),
    ):
        self._adapters = adapters
        self._score, self._known = score, scored_fields() if score else known_fields()
        known = self._known
        self._names_texts = score and (template is None or template.columns == frozenset())  # else a template may
        read = template.columns if template else frozenset()
        names = known.union([column] if column else (), read or ())
        offered = known - UNSUPPORTED.keys()
        self.unknown = UnknownFields(names, offered, kept.selection if kept else None, every=read is None)
        self._roles = UnknownRoles(self.unknown.tell)
        self._ids = ids(self.unknown.tell) if ids else None
        self._column, self._model, self._kept, self._template = column, model, kept, template

    def read(self, raw: RawRow, defaults: SamplingParams) -> Row | RowError:
        """Return a parsed row, or a RowError if it cannot be used. Its own fields replace `defaults`."""
        line, row_id = raw.number, None
        try:
            given = row_fields(raw.data)
            given = with_prompt(given, self._column) if self._names_texts else given
            if self._kept is not None:
                self._kept.read(line, given, CONTINUATIONS if self._score else ())
            row_id, place = id_of(given, line), raw.place[:-2] or f"line {line}"
            fields = self._own(given, place)
            fields = self._template.fields(fields) if self._template else fields
            source = source_of(fields)
            messages = messages_of(fields) if source == "messages" else None
            scored = continuations_of(fields, source) if self._score else None
            lora = adapter_of(fields, self._adapters)
            self._doubt(place, line, row_id, messages)
            return Row(
                line=line,
                id=row_id,
                prompt=(prompt_of_scored if scored else text_of)(fields) if source == "prompt" else None,
                prompt_token_ids=token_ids_of(fields) if source == "prompt_token_ids" else None,
                messages=messages,
                params=row_params(_scoring_only(fields) if scored else fields, defaults),
                chat=chat_options(fields),
                scored=scored,
                adapter=self._adapters.index(lora) if lora and self._adapters is not None else -1,
                lora=lora,
            )
        except RowProblem as e:
            return row_error(line, row_id, f"{raw.place}{e}")

    def _doubt(self, place: str, line: int, row_id: str, messages: list[dict[str, Any]] | None) -> None:
        """Warn about what may be mistaken in a row that can be used."""
        if messages:
            self._roles.row(place, messages)
        if self._ids is not None and row_id != str(line):
            self._ids.row(line, row_id)

    def _own(self, given: dict[str, Any], place: str) -> dict[str, Any]:
        """Return the fields of a row under their usual names, and warn about unknown ones."""
        if is_request(given) and not any(name in given for name in SOURCES):
            self.unknown.row(place, given.keys() - LINE_FIELDS)
            return request_fields(given, self._model, self._known, self._adapters or ())
        self.unknown.row(place, given)
        return renamed(given, self._column)


@cache
def known_fields() -> frozenset[str]:
    """Return the names of all fields that a row may have, unsupported ones included."""
    names = (LORA, OPENAI_LOGPROBS, OPENAI_MAX_TOKENS, RESPONSE_FORMAT)
    return frozenset(("id", "custom_id", *SOURCES, *CHAT_FIELDS, *names, *UNSUPPORTED, *sampling_kinds()))


@cache
def scored_fields() -> frozenset[str]:
    """Return the names of all fields that a row may have that is scored."""
    names = ("id", "custom_id", TEXT, *SOURCES, *CHAT_FIELDS, *CONTINUATIONS, *SCORING_PARAMS, LORA, OPENAI_LOGPROBS)
    return frozenset(names)


def row_fields(data: RawData) -> dict[str, Any]:
    """Return the fields of a row before they are checked. Raises RowProblem if it has none."""
    if isinstance(data, RowProblem):
        raise data
    if data is None:
        raise RowProblem(f"expected a line of at most {MAX_LINE_BYTES} bytes, got a longer one")
    return data if isinstance(data, dict) else _json_object(data)


def _scoring_only(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that say how a row is scored; those of sampling mean nothing for it."""
    return {name: fields[name] for name in (*SCORING_PARAMS, OPENAI_LOGPROBS) if name in fields}


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except RecursionError as e:
        raise RowProblem("expected a JSON object, got one nested too deeply") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:  # the latter before msgspec 0.23
        raise _no_json(data, e) from e
    if not isinstance(value, dict):
        raise RowProblem(f"expected a JSON object, got {type_name(value)}")
    return value


def _no_json(data: bytes, error: Exception) -> RowProblem:
    try:
        data.decode()
    except UnicodeDecodeError as e:
        return RowProblem(f"expected UTF-8 text, got invalid UTF-8: {e.reason}")
    return RowProblem(f"expected a JSON object on one line, got invalid JSON: {error}")


def id_of(fields: dict[str, Any], line: int) -> str:
    """Return the id of a row: its own, or its line. Raises RowProblem if its own cannot be used."""
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
