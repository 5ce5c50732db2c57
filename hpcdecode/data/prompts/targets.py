"""Token ids of rows that are scored: where a prompt ends and its continuation begins, and windows over long texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from hpcdecode.data.prompts.continuations import Continuations
from hpcdecode.data.prompts.rows import Row
from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.target import Target, joined


class Encoder(Protocol):
    """What is needed of a tokenizer; see `Tokenizer`."""

    backend: Any

    def encode(self, row: Row) -> list[int]:
        """Return all token ids of a row."""

    def encode_any(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, which may be none."""

    def text(self, row: Row) -> str:
        """Return the prompt of a row as text."""

    def checked(self, ids: list[int]) -> list[int]:
        """Return token ids that are in the vocabulary."""

    def check_params(self, params: SamplingParams) -> None:
        """Raise RowProblem if parameters are not usable."""


def scored_prompt(row: Row, scored: Continuations, tokenizer: Encoder, max_positions: int) -> Prompt:
    """Return a row with what is scored of it.

    Raises:
        RowProblem: It cannot be encoded, is too long, or nothing of it can be scored.
    """
    tokenizer.check_params(row.params)
    if not scored.any:
        ids = _text_ids(row, tokenizer, max_positions)
        texts = [""] if row.prompt_token_ids is None else []  # the prompt's text is among the results already
        targets = list(windows(ids, max_positions))
        return _prompt(row, [], targets, texts)
    context, pairs = _pairs(row, scored, tokenizer)
    for index, ids in enumerate(pairs):
        _require_tokens(scored, index, ids)
    targets = [
        _target(context, ids, sample, row.params.truncate_prompt_tokens, max_positions)
        for sample, ids in enumerate(pairs)
    ]
    return _prompt(row, context, joined(targets), scored.texts)


def _prompt(row: Row, ids: list[int], targets: list[Target], texts: list[str]) -> Prompt:
    about = row.line, row.id, ids, row.params
    return Prompt(*about, targets=targets, texts=texts, adapter=row.adapter, lora=row.lora)


def windows(token_ids: list[int], size: int) -> Iterator[Target]:
    """Yield targets that score each token of a text once, but for its first, in windows of `size` tokens at most.

    As lm-eval's `loglikelihood_rolling` has them: the first token of each window is context alone. Of the last one more
    are, so that its tokens have as many before them as there is room for.
    """
    count, done = len(token_ids), 1
    while done < count:
        end = min(done + size, count)
        begin = max(end - size - 1, 0)
        yield Target.of(token_ids[begin:end], done - begin, 0)
        done = end


def _text_ids(row: Row, tokenizer: Encoder, max_positions: int) -> list[int]:
    ids = tokenizer.encode(row)
    if (kept := row.params.truncate_prompt_tokens) is not None:
        ids = ids[-(max_positions + 1 if kept == -1 else kept) :]
    if len(ids) < 2:
        raise RowProblem("expected a text of at least two tokens, of which the first has no log-probability, got one")
    return ids


def _pairs(row: Row, scored: Continuations, tokenizer: Encoder) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of the prompt, and those of every continuation.

    As in lm-eval, white space at the end of the prompt belongs to the continuations, and a continuation's tokens are
    those that prompt and continuation together have behind as many tokens as the prompt alone has. Choices are one
    token each, so the white space stays with the prompt if they are that only then.
    """
    if not scored.texts:
        context = tokenizer.encode(row) if row.prompt != "" else _begin(tokenizer)
        return context, [tokenizer.checked(ids) for ids in scored.token_ids]
    text = tokenizer.text(row)
    whole = [text + continuation for continuation in scored.texts]
    bare, full, *encoded = tokenizer.encode_any([text.rstrip(), text, *whole], add_special_tokens=row.messages is None)
    moved, kept = ([ids[len(context) :] for ids in encoded] for context in (bare, full))
    if scored.single and any(len(ids) != 1 for ids in moved) and all(len(ids) == 1 for ids in kept):
        return full, kept
    return bare or _begin(tokenizer), moved


def _begin(tokenizer: Encoder) -> list[int]:
    """Return the token that stands before a text that nothing precedes: as in lm-eval, the BOS, else an EOS token."""
    backend = tokenizer.backend
    token = backend.eos_token_id if backend.bos_token_id is None else backend.bos_token_id
    if token is None:
        raise RowProblem("prompt: expected a string that is not empty, as the tokenizer has no BOS or EOS token")
    return [token]


def _require_tokens(scored: Continuations, index: int, ids: list[int]) -> None:
    """Raise RowProblem if a continuation has no token, or not the one that a choice must be."""
    place = scored.field if scored.field == "continuation" else f"{scored.field}[{index}]"
    if not ids:
        raise RowProblem(f"{place}: expected text of at least one token behind the prompt, got none")
    if scored.single and len(ids) != 1:
        raise RowProblem(f"{place}: expected text of one token, got {len(ids)}; use continuations")


def _target(context: list[int], ids: list[int], sample: int, kept: int | None, max_positions: int) -> Target:
    """Return the target of a continuation; kept: how many tokens of the prompt, -1 for as many as there is room for.

    Raises:
        RowProblem: There is no room for it.
    """
    room = max_positions + 1 - len(ids)  # the last token is not fed to the model
    context = context if kept is None or room < 1 else context[-min(room if kept == -1 else kept, len(context)) :]
    if len(context) > room:
        raise RowProblem(
            f"prompt and continuation too long: expected at most {max_positions + 1} tokens together (the model's "
            f"context and one more), got {len(context)} + {len(ids)}; truncate_prompt_tokens -1 takes what fits"
        )
    return Target.of([*context, *ids], len(context), sample)
