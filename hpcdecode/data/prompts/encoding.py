"""Rows to prompts: texts are encoded in chunks, and what is too long is refused before it is encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcdecode.data.prompts.kept import KeptColumns
from hpcdecode.data.prompts.room import require_room, room_for_prompt
from hpcdecode.data.prompts.rows import Row, RowError, row_error
from hpcdecode.data.prompts.targets import scored_prompt
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import RowProblem
from hpcdecode.requests.prompt import Prompt

CHUNK_ROWS = 64  # rows that one call of the tokenizer encodes at most
CHUNK_CHARACTERS = 1 << 20
PROBE_CHARACTERS = 32  # per position of the model; of a longer text, a prefix of this size is encoded first


def tokenized(
    rows: Iterable[Row | RowError], tokenizer: Tokenizer, max_positions: int, kept: KeptColumns | None = None
) -> Iterator[Prompt | RowError]:
    """Yield rows as prompts, in order.

    Rows are encoded in chunks: one row at first, then up to CHUNK_ROWS. A row becomes a RowError if it cannot be
    encoded or leaves no position for a new token.

    Args:
        rows: Rows, and rows that cannot be used, which are passed on.
        tokenizer: The model's tokenizer.
        max_positions: Number of positions that the model has.
        kept: Keeps the text of prompts; None keeps none.
    """
    for chunk in _chunks(rows):
        encoded = _encode_together(chunk, tokenizer, max_positions)
        for row in chunk:
            if isinstance(row, RowError):
                yield row
                continue
            prompt = _prompt(row, encoded.get(row.line), tokenizer, max_positions)
            if kept is not None and (text := row.rendered or row.prompt):
                kept.prompt(row.line, text)
            yield prompt


def _chunks(rows: Iterable[Row | RowError]) -> Iterator[list[Row | RowError]]:
    chunk: list[Row | RowError] = []
    size, limit = 0, 1
    for row in rows:
        chunk.append(row)
        size += len(row.prompt or "") if isinstance(row, Row) else 0
        if len(chunk) >= limit or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size, limit = [], 0, min(2 * limit, CHUNK_ROWS)
    if chunk:
        yield chunk


def _encode_together(chunk: list[Row | RowError], tokenizer: Tokenizer, max_positions: int) -> dict[int, list[int]]:
    """Return the token ids of a chunk's plain prompts by line, or none if one of them cannot be encoded."""
    plain = [
        (row.line, row.prompt)
        for row in chunk
        if isinstance(row, Row) and row.prompt and row.scored is None and row.params.truncate_prompt_tokens is None
    ]
    plain = [(line, text) for line, text in plain if not _needs_probe(text, max_positions)]
    if len(plain) < 2:
        return {}
    try:
        encoded = tokenizer.encode_texts([text for _, text in plain])
    except RowProblem:  # each is then encoded alone
        return {}
    return {line: ids for (line, _), ids in zip(plain, encoded, strict=True)}


def _prompt(row: Row, ids: list[int] | None, tokenizer: Tokenizer, max_positions: int) -> Prompt | RowError:
    try:
        if row.scored is not None:
            if row.prompt and row.scored.any and _needs_probe(row.prompt, max_positions):
                _probe(row.prompt, tokenizer, max_positions)
            return scored_prompt(row, row.scored, tokenizer, max_positions)
        tokenizer.check_params(row.params)
        ids = _encode_alone(row, tokenizer, max_positions) if ids is None else ids
        require_room(len(ids), "", max_positions)
        bad_word_ids = tokenizer.bad_word_ids(row.params.bad_words)
    except RowProblem as e:
        return row_error(row.line, row.id, e)
    thinking = tokenizer.thinking(row.params, ids)
    about = row.line, row.id, ids, row.params
    return Prompt(*about, bad_word_ids=bad_word_ids, thinking=thinking, adapter=row.adapter, lora=row.lora)


def _encode_alone(row: Row, tokenizer: Tokenizer, max_positions: int) -> list[int]:
    count = row.params.truncate_prompt_tokens
    if count is not None:
        return tokenizer.encode_last(
            row, room_for_prompt(row.params.max_tokens, max_positions) if count == -1 else count
        )
    if row.prompt_token_ids is not None:
        return tokenizer.encode(row)
    text = tokenizer.text(row)
    if _needs_probe(text, max_positions):
        _probe(text, tokenizer, max_positions)
    return tokenizer.encode_texts([text], add_special_tokens=row.messages is None)[0]


def _needs_probe(text: str, max_positions: int) -> bool:
    return len(text) > PROBE_CHARACTERS * max_positions


def _probe(text: str, tokenizer: Tokenizer, max_positions: int) -> None:
    """Refuse a text if its prefix alone is twice too long, since megabytes of text take minutes to encode."""
    prefix = tokenizer.encode_texts([text[: PROBE_CHARACTERS * max_positions]])[0]
    if len(prefix) >= 2 * max_positions:
        require_room(len(prefix), "more than ", max_positions)
