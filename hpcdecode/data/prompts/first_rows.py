"""Reads the first rows of a job before anything is loaded, and refuses the job if none of them can be used."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext, suppress
from itertools import islice
from typing import Any

from hpcdecode.config import LITERAL, STDIN, Job
from hpcdecode.data.prompts.batch_format import is_request
from hpcdecode.data.prompts.files import RawRow, raw_rows
from hpcdecode.data.prompts.hints import columns_hint
from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.prompts.opening import is_once
from hpcdecode.data.prompts.row_template import SOURCES, RowTemplate
from hpcdecode.data.prompts.rows import Row, RowError, RowReader, row_error, row_fields
from hpcdecode.data.prompts.standard_input import FarEnough, looking_ahead
from hpcdecode.data.prompts.vocabulary import NO_TOKENIZER
from hpcdecode.errors import RowProblem, UserError

FIRST_ROWS = 100  # that are read at most
_MAX_BYTES = 64 << 20  # of rows that cannot be used


def require_usable(job: Job, files: Sequence[str], template: RowTemplate | None) -> None:
    """Raise UserError if none of the first rows of a job can be used, with the reason of the first.

    Rows are read up to the first that can be used. What is read of standard input is given again; a pipe with a name
    is left alone. Rows that only the tokenizer refuses are not found here.

    Args:
        job: The job.
        files: Its prompt files.
        template: Makes its prompts of columns; None if rows have prompts.

    Raises:
        UserError: A file cannot be read, too.
    """
    if any(is_once(path) for path in files if path != STDIN):
        return
    with looking_ahead() if STDIN in files else nullcontext(), suppress(FarEnough):
        found = _FoundRows(job, template)
        with closing(_rows(job, files, template)) as rows:
            if not any(map(found.usable, rows)) and found.errors:
                raise UserError(found.problem())


def _rows(job: Job, files: Sequence[str], template: RowTemplate | None) -> Generator[RawRow, None, None]:
    """Yield the first rows that a job is to do, with all their columns."""
    kept = KeptColumns(Selection(ALL, job.prompt_column))
    unknown = RowReader(job.prompt_column, kept=kept, template=template, score=job.score).unknown
    unknown.quiet = True  # what there is to say is said when the rows are read again
    rows = islice(raw_rows(files, job.prompt_column, unknown), job.limit)
    wanted = (raw for raw in rows if job.shard is None or job.shard.holds(raw.number))
    yield from islice(wanted, FIRST_ROWS)


class _FoundRows:
    """What the first rows have.

    Args:
        job: Their job.
        template: Makes its prompts of columns, or None.

    Attributes:
        errors: Rows that cannot be used.
    """

    def __init__(self, job: Job, template: RowTemplate | None) -> None:
        self._job = job
        self._reader = RowReader(
            job.prompt_column, job.model, template=template, score=job.score, adapters=tuple(job.adapters)
        )
        self._reader.unknown.quiet = True
        self.errors: list[RowError] = []
        self._size = 0  # their bytes, if they are lines
        self._columns: dict[str, bool] = {}  # names, and whether a row has a text or a list there
        self._has_prompts = False

    def usable(self, raw: RawRow) -> bool:
        """Return whether there is no need to look further: the row can be used, or there is too much to look at."""
        row = self._reader.read(raw, self._job.params)
        if isinstance(row, Row) and self._job.skip_tokenizer_init and row.prompt_token_ids is None:
            row = row_error(row.line, row.id, RowProblem(f"expected {NO_TOKENIZER}"))
        if isinstance(row, Row):
            return True
        self.errors.append(row)
        self._size += len(raw.data) if isinstance(raw.data, bytes) else 0
        with suppress(RowProblem):
            self._note(row_fields(raw.data))
        return self._size > _MAX_BYTES

    def problem(self) -> str:
        """Return why the job is refused."""
        count, first = len(self.errors), self.errors[0]
        literal = all(path.startswith(LITERAL) for path in self._job.prompts)
        what, place = ("prompts", "prompt") if literal else ("rows", "line")
        got = "one that cannot" if count == 1 else f"{'the first ' * (count == FIRST_ROWS)}{count} that cannot"
        expected = f"expected {what} that can be used, got {got}"
        return f"{expected}: {place} {first.line}: {first.reason}{self._hint()}"

    def _note(self, fields: dict[str, Any]) -> None:
        for name, value in islice(fields.items(), 1000):
            self._columns[name] = self._columns.get(name, False) or (isinstance(value, (str, list)) and bool(value))
        job = self._job
        if job.prompt_template or job.messages_template:
            self._has_prompts = True  # the reason names the columns
        elif job.prompt_column:
            self._has_prompts |= fields.get(job.prompt_column) is not None
        else:
            self._has_prompts |= is_request(fields) or any(fields.get(name) is not None for name in SOURCES)

    def _hint(self) -> str:
        if self._has_prompts:
            return ""
        return columns_hint(list(self._columns), [name for name, usable in self._columns.items() if usable])
