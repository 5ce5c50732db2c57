"""What a row asks to have scored: continuations of its prompt, choices of one token, or the prompt itself as a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hpcdecode.data.prompts.row_sources import text_of, token_ids_of
from hpcdecode.data.prompts.row_template import SOURCES
from hpcdecode.errors import RowProblem
from hpcdecode.requests.values import shown, type_name

TEXT = "text"  # another name of the prompt of a row without continuations
CONTINUATIONS = ("continuation", "continuations", "choices", "continuation_token_ids", "logprob_token_ids")
LISTS = frozenset(CONTINUATIONS[1:])  # those that are no text
SCORING_PARAMS = ("logprobs", "truncate_prompt_tokens")  # the sampling fields that mean something
MAX_CONTINUATIONS = 1000  # of a row; of choices more, which take one sequence together
MAX_CHOICES = 10_000


class Continuations(msgspec.Struct):
    """What is scored of a row: texts or token ids that follow its prompt; the prompt as a text if there are neither.

    Attributes:
        field: Name of the row's field.
        single: Whether each must be one token.
    """

    field: str = ""
    texts: list[str] = []
    token_ids: list[list[int]] = []
    single: bool = False

    @property
    def any(self) -> bool:
        """Whether there are continuations."""
        return bool(self.texts or self.token_ids)


def with_prompt(fields: dict[str, Any], column: str | None) -> dict[str, Any]:
    """Return the fields of a row, with the name `prompt` for those of `text`, if it is the only source."""
    if column is not None or fields.get(TEXT) is None or any(fields.get(name) is not None for name in SOURCES):
        return fields
    return {"prompt" if name == TEXT else name: value for name, value in fields.items() if name not in SOURCES}


def prompt_of_scored(fields: dict[str, Any]) -> str:
    """Return the text of a prompt, which may be empty if something follows it. Raises RowProblem if it is no text."""
    return "" if fields["prompt"] == "" and any(fields.get(name) for name in CONTINUATIONS) else text_of(fields)


def continuations_of(fields: dict[str, Any], source: str) -> Continuations:
    """Return what is scored of a row whose prompt is in the field `source`.

    Raises:
        RowProblem: A field has a wrong type, or several say what is scored, or texts follow token ids.
    """
    given = [name for name in CONTINUATIONS if fields.get(name) is not None]
    if not given:
        return Continuations()
    if len(given) > 1:
        raise RowProblem(f"expected at most one of {', '.join(CONTINUATIONS)}, got {' and '.join(given)}")
    (name,) = given
    made = _KINDS[name](name, fields[name])
    if made.texts and source == "prompt_token_ids":
        raise RowProblem(
            f"{name}: expected continuation_token_ids or logprob_token_ids beside prompt_token_ids, got texts"
        )
    return made


def _texts(name: str, value: Any) -> Continuations:
    values = [value] if name == "continuation" else _list(name, value, "strings")
    for index, text in enumerate(values):
        if not isinstance(text, str) or not text:
            place = name if name == "continuation" else f"{name}[{index}]"
            got = "an empty one" if text == "" else f"{type_name(text)} {shown(text)}"
            raise RowProblem(f"{place}: expected a string that is not empty, got {got}")
    return Continuations(name, texts=values, single=name == "choices")


def _token_lists(name: str, value: Any) -> Continuations:
    values = _list(name, value, "token ids, or of lists of them")
    lists = values if isinstance(values[0], list) else [values]
    if len(lists) > MAX_CONTINUATIONS:
        raise _too_many(name, len(lists), MAX_CONTINUATIONS)
    return Continuations(name, token_ids=[_ids(name, each) for each in lists])


def _single_tokens(name: str, value: Any) -> Continuations:
    values = _list(name, value, "token ids")
    return Continuations(name, token_ids=[[token] for token in _ids(name, values)], single=True)


_KINDS: dict[str, Callable[[str, Any], Continuations]] = {
    "continuation": _texts,
    "continuations": _texts,
    "choices": _texts,
    "continuation_token_ids": _token_lists,
    "logprob_token_ids": _single_tokens,
}


def _ids(name: str, value: Any) -> list[int]:
    try:
        return token_ids_of({"prompt_token_ids": value})
    except RowProblem as problem:
        raise RowProblem(str(problem).replace("prompt_token_ids", name, 1)) from None


def _list(name: str, value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowProblem(f"{name}: expected a list of {what}, got {type_name(value)} {shown(value)}")
    if not value:
        raise RowProblem(f"{name}: expected at least one element, got an empty list")
    most = MAX_CONTINUATIONS if name == "continuations" else MAX_CHOICES
    if name != "continuation_token_ids" and len(value) > most:
        raise _too_many(name, len(value), most)
    return value


def _too_many(name: str, count: int, most: int) -> RowProblem:
    return RowProblem(f"{name}: expected at most {most} elements, got {count}; divide them among several rows")
