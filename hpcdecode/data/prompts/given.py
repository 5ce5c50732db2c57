"""Prompts that a caller of the Python API gives: as rows with sampling parameters, and what is known of them later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.fields import LORA, row_params
from hpcdecode.data.prompts.files import RawRow
from hpcdecode.data.prompts.rows import Row, RowError, RowReader
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import PromptError, RowProblem
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt


def as_row(prompt: object) -> object:
    """Return a prompt in the form of a row of a prompt file."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def with_adapter(prompt: object, adapter: str | None) -> object:
    """Return a prompt in the form of a row, with an adapter if it names none itself; None for none."""
    row = as_row(prompt)
    if adapter is None or not isinstance(row, dict) or row.get(LORA) is not None:
        return row
    return {**row, LORA: adapter}


def with_params(
    fields: list[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[object, SamplingParams]]:
    """Return rows with their sampling parameters.

    Raises:
        PromptError: If parameters cannot be used, or are not one for each row.
    """
    if params is None or isinstance(params, SamplingParams):
        return [(each, checked) for checked in [_checked(params or SamplingParams())] for each in fields]
    if len(params) != len(fields):
        raise PromptError(f"sampling_params: expected one for each of {len(fields)} prompts, got {len(params)}")
    return [(each, _checked(own)) for each, own in zip(fields, params, strict=True)]


def each_with_params(
    prompts: Iterable[object], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[object, SamplingParams]]:
    """Return prompts as rows with their sampling parameters, one by one; those for all are checked at once."""
    if params is None or isinstance(params, SamplingParams):
        checked = _checked(params or SamplingParams())
        return ((as_row(prompt), checked) for prompt in prompts)
    return _with_own_params(prompts, iter(params))


def _with_own_params(
    prompts: Iterable[object], params: Iterator[SamplingParams]
) -> Iterator[tuple[object, SamplingParams]]:
    number = 0
    for number, prompt in enumerate(prompts, 1):
        if (own := next(params, None)) is None:
            raise PromptError(f"sampling_params: expected one for each prompt, got {number - 1} and more prompts")
        yield as_row(prompt), _checked(own)
    if next(params, None) is not None:
        raise PromptError(f"sampling_params: expected one for each of {number} prompts, got more")


def _checked(params: SamplingParams) -> SamplingParams:
    """Return the parameters after the checks that the rows of prompt files undergo."""
    try:
        return row_params(msgspec.to_builtins(params, str_keys=True), SamplingParams())
    except RowProblem as problem:
        raise PromptError(f"sampling_params: {problem}") from None


def read_prompt(
    line: int,
    fields: dict[str, Any],
    defaults: SamplingParams,
    tokenizer: Tokenizer,
    max_positions: int,
    *,
    model: str | None = None,
    score: bool = False,
    adapters: Sequence[str] = (),
) -> Prompt:
    """Return one row as a prompt, without warnings.

    Args:
        line: Number of the row.
        fields: Those of the row.
        defaults: Sampling parameters that they replace.
        tokenizer: Of the model.
        max_positions: Number of positions that there are.
        model: Directory of the model, which a request may name. None accepts any name.
        score: Whether the row is scored.
        adapters: Names of the adapters that it may choose.

    Raises:
        RowProblem: The row cannot be used.
    """
    reader = RowReader(model=model, score=score, adapters=adapters)
    reader.unknown.quiet = True
    (found,) = tokenized([reader.read(RawRow(line, "", fields), defaults)], tokenizer, max_positions)
    if isinstance(found, RowError):
        raise RowProblem(found.reason)
    return found


def read_row(reader: RowReader, number: int, fields: Any, params: SamplingParams) -> Row | RowError:
    """Return a row, or why it cannot be used."""
    if not isinstance(fields, dict):
        return RowError(number, str(number), f"expected a string or a dict, got {type(fields).__name__}")
    return reader.read(RawRow(number, "", fields), params)


class KnownPrompts:
    """What the caller gets back of prompts that are not finished: their texts and tokens, by line."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._token_ids: dict[int, list[int]] = {}

    def rows(self, rows: Iterable[Row | RowError]) -> Iterator[Row | RowError]:
        """Yield rows, which are encoded later."""
        for row in rows:
            if isinstance(row, Row):
                self._rows[row.line] = row
            yield row

    def prompts(self, prompts: Iterable[Prompt | RowError]) -> Iterator[Prompt | RowError]:
        """Yield encoded rows."""
        for prompt in prompts:
            if isinstance(prompt, Prompt):
                self._token_ids[prompt.line] = prompt.token_ids
            yield prompt

    def take(self, line: int) -> tuple[str | None, list[int]]:
        """Return text and tokens of a prompt that is finished, and forget them."""
        row = self._rows.pop(line, None)
        return None if row is None else text_of_row(row), self._token_ids.pop(line, [])


def text_of_row(row: Row) -> str | None:
    """Return the text of an encoded prompt; None if it was given as token ids."""
    return row.rendered or row.prompt
