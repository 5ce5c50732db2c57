"""Reads the rows of Arrow files (Feather version 2, streams, and shards of saved `datasets`), and counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcdecode.data.prompts.arrow_messages import batch_claims, check_claims, open_arrow
from hpcdecode.data.prompts.columnar import batch_rows, used_columns
from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.prompts.unknown import UnknownFields

_ROWS = 32  # that become Python values at once: values of a dictionary may be large and repeat


def arrow_rows(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file, which is mapped into memory, as `table_rows` does.

    The file is read as the stream of messages that it holds; the index at its end is not believed.
    """
    ipc = import_extra("pyarrow.ipc", path, "parquet")
    check_claims(path)
    names: list[str] = ipc.open_stream(open_arrow(path)).schema.names
    used = used_columns(path, names, column, unknown)
    options = ipc.IpcReadOptions(included_fields=sorted(names.index(name) for name in used))
    with ipc.open_stream(open_arrow(path), options=options) as reader:
        for batch in reader:
            _validate(batch)
            for start in range(0, batch.num_rows, _ROWS):
                yield from batch_rows(batch.slice(start, _ROWS), unknown.known)


def count_arrow_rows(path: str) -> int:
    """Return the number of rows of an Arrow file."""
    return sum(claim.rows for claim in batch_claims(path))


def _validate(batch: Any) -> None:
    """Raise an exception of pyarrow's if offsets or indices lead out of a batch; text may be no UTF-8."""
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid:
        plain = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
        for column in batch.columns:
            kind = plain.get(column.type)
            (column.view(kind) if kind else column).validate(full=True)
