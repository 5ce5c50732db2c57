"""What readers of tables have in common: which columns are read, and rows of batches of Arrow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hpcdecode.data.prompts.hints import flags_hint
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable


def used_columns(
    path: str,
    names: list[str],
    column: str | None,
    unknown: UnknownFields,
    check: Callable[[str], None] | None = None,
) -> list[str]:
    """Return the columns of a table to read: those with a meaning, and those to keep.

    Args:
        path: Path of the table.
        names: Names of its columns.
        column: Column of the prompts; None for the fields of JSON rows.
        unknown: Knows the names of the other columns to read.
        check: Raises UserError if a column cannot be read; None if all can.

    Raises:
        UserError: There are no prompts, or a column is there twice or cannot be read.
    """
    require_prompts(path, column, names, names, unknown)
    unknown.columns(path, names)
    used = [name for name in names if unknown.reads(name)]
    for name in used:
        _require_once(path, name, names)
        if check:
            check(name)
    for name in dict.fromkeys(names):
        if not unknown.reads(name) and unknown.keeps(name):
            with optional(unknown):
                _require_once(path, name, names)
                if check:
                    check(name)
                used.append(name)
    return used


def require_prompts(
    path: str, column: str | None, usable: Collection[str], present: Collection[str], unknown: UnknownFields
) -> None:
    """Raise UserError unless a usable column can hold the prompts; `present` are the columns of the table."""
    if column in usable or (column is None and any(unknown.reads(name) for name in usable)):
        return
    found = printable(", ".join(sorted(present)) or "none")
    flat = " (of one dimension: none)" if found != "none" and not usable else ""
    hint = "" if flat else flags_hint(present)
    raise UserError(
        f"prompt file {printable(path)}: expected a column {column or 'prompt'!r}, found {found}{flat}{hint}"
    )


@contextmanager
def optional(unknown: UnknownFields) -> Iterator[None]:
    """Turn the refusal of a column that is only to be kept into a warning, unless it was asked for by name."""
    try:
        yield
    except UserError as e:
        if unknown.kept is None or not unknown.kept.all:
            raise
        unknown.tell(f"{e}; the column is not kept")


def refused(path: str, name: str, expected: str) -> UserError:
    """Return the error that refuses a column."""
    return UserError(f"prompt file {printable(path)}: {printable(name)}: expected {expected}")


def decoded(value: Any) -> Any:
    """Return bytes of UTF-8 as text, and any other value unchanged."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def batch_rows(batch: Any, known: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch of Arrow; text that is not UTF-8 stays bytes, which every field refuses.

    Args:
        batch: A `pyarrow.RecordBatch`.
        known: Names of columns with a meaning.
    """
    batch = _with_readable_times(batch, known)
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        yield from _without_text(batch)


def _require_once(path: str, name: str, names: list[str]) -> None:
    if names.count(name) > 1:
        raise refused(path, name, f"one column of this name, found {names.count(name)}")


def _with_readable_times(batch: Any, known: Collection[str]) -> Any:
    """Return a batch in which times in columns that are only kept are text, as Python has no type for all of them."""
    import pyarrow

    for index, field in enumerate(batch.schema):
        if field.name not in known and pyarrow.types.is_temporal(field.type):
            with suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
                batch = batch.set_column(index, field.name, batch.column(index).cast(pyarrow.string()))
    return batch


def _without_text(batch: Any) -> Iterator[dict[str, Any]]:
    import pyarrow

    text = (pyarrow.string(), pyarrow.large_string())
    columns = [c.cast(pyarrow.large_binary()) if c.type in text else c for c in batch.columns]
    for values in zip(*columns, strict=True):
        yield {name: decoded(v.as_py()) for name, v in zip(batch.schema.names, values, strict=True)}
