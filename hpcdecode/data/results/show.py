"""The command `hpcdecode show OUT.h5 [LINE ...]`: prints rows of a results file as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from hpcdecode.data.results.read import Results

_DEFAULT_ROWS = 5  # shown if no line is named


def show(path: str, lines: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text to print: a summary, then rows and errors.

    Args:
        path: The results file.
        lines: Lines of the prompt file to show; by default the first rows.

    Raises:
        UserError: The file is not a results file.
    """
    with Results(path) as results:
        errors = results.errors()
        state = "complete" if results.complete else "not complete"
        yield f"{path}: {len(results)} rows, {len(errors)} errors, {state}"
        wanted = (results.samples(line) for line in sorted(set(lines)))
        rows = chain.from_iterable(wanted) if lines else islice(results, _DEFAULT_ROWS)
        for row in rows:
            yield _row(row)
        for error in (e for e in errors if e["line"] in lines) if lines else errors[:_DEFAULT_ROWS]:
            yield f"\n--- line {error['line']}, id {error['id']}: error: {error['reason']}"


def _row(row: dict[str, Any]) -> str:
    tokens = f"{row['prompt_tokens']} + {len(row['token_ids'])} tokens"
    sample = f", sample {row['sample']}" if row["sample"] else ""
    return f"\n--- line {row['line']}, id {row['id']}{sample}, {tokens}, {row['finish_reason']}\n{row['text']}"
