"""Conditions on the rows of a results file, such as `finish_reason=stop`, `line>=100` or `label=yes`."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from math import isnan
from typing import Any, NamedTuple

import numpy as np

from hpcdecode.data.results.layout import FINISH_REASONS, PARSED, ROW_COLUMNS
from hpcdecode.data.results.read import Results
from hpcdecode.data.results.strings import STRING
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable, suggestion

Compare = Callable[[Any, Any], Any]
_COMPARE: dict[str, Compare] = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_SIGN = re.compile("!=|>=|<=|=|>|<")
_EQUALITIES = ("=", "!=")


class Condition(NamedTuple):
    """A condition on rows.

    Attributes:
        text: As it was given.
        column: Its column.
        accepts: Returns for values of the column, [n], which ones are accepted, [n] bool.
    """

    text: str
    column: str
    accepts: Callable[[np.ndarray], np.ndarray]


def conditions_of(texts: Sequence[str], results: Results) -> list[Condition]:
    """Return conditions on the rows of results.

    Args:
        texts: A column, a sign and a value each. Columns are those of every row, and the input columns.
        results: The results.

    Raises:
        UserError: If a text is no condition, there is no such column, or it has no such values.
    """
    return [_condition(text, results) for text in texts]


def accepted(results: Results, conditions: Sequence[Condition], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield columns of the rows that meet all conditions, some thousand rows at a time: arrays [n] by name."""
    needed = dict.fromkeys([*columns, *(condition.column for condition in conditions)])
    for batch in results.batches(list(needed)):
        met = np.ones(len(next(iter(batch.values()))), bool)
        for condition in conditions:
            met &= condition.accepts(batch[condition.column])
        yield {name: batch[name][met] for name in columns}


def _condition(text: str, results: Results) -> Condition:
    known = [name for name in ROW_COLUMNS if name not in PARSED and name in results.columns]
    known += [name for name in results.inputs.names if name not in known]
    name, sign, value = _parts(text, known)
    if name not in known:
        raise UserError(
            f"--where {printable(text)}: expected a column of {printable(', '.join(known)):.2000}, got {name!r}"
            f"{suggestion(name, known)}"
        )
    kind = results.inputs.value_dtype(name) if name in results.inputs.names else ROW_COLUMNS[name].dtype
    if name == "finish_reason":
        if value not in FINISH_REASONS:
            raise UserError(f"--where {text}: expected {' or '.join(FINISH_REASONS)} for finish_reason, got {value!r}")
        kind = STRING
    if kind is not None and kind is not STRING:
        _require_fits(text, name, value, np.dtype(kind).kind, sign)
    return Condition(text, name, lambda values: _accepts(values, sign, value))


def _parts(text: str, known: Sequence[str]) -> tuple[str, str, str]:
    """Return column, sign and value. The column ends at the first sign after a known name, else at the first sign."""
    found = [(text[: m.start()].strip(), m[0], text[m.end() :].strip()) for m in _SIGN.finditer(text)]
    found = [parts for parts in found if parts[0]]
    if not found:
        raise UserError(f"--where {printable(text)}: expected COLUMN, one of {' '.join(_COMPARE)}, and a value")
    return next((parts for parts in found if parts[0] in known), found[0])


def _require_fits(text: str, name: str, value: str, kind: str, sign: str) -> None:
    """Raise UserError unless a value can be compared with those of a column of one kind."""
    if value == "null":
        return
    if kind == "b" and (_truth(value) is None or sign not in _EQUALITIES):
        raise UserError(f"--where {text}: expected = or != and true or false for {name}, got {sign} {value!r}")
    if kind != "b" and _number(value) is None:
        raise UserError(f"--where {text}: expected a number for {name}, got {value!r}")


def _accepts(values: np.ndarray, sign: str, value: str) -> np.ndarray:
    """Return which values [n] meet a condition, [n] bool."""
    number = _number(value)
    if values.dtype.kind in "iuf" and number is not None:
        return np.asarray(_COMPARE[sign](values, number), bool)
    meets = _meets(sign, value)
    return np.fromiter((meets(each) for each in values.tolist()), bool, len(values))


def _meets(sign: str, value: str) -> Callable[[Any], bool]:
    """Return what says whether a value of a row meets a condition.

    Numbers are compared as numbers, texts too if both are numbers and the order is asked for. A value of another kind
    differs, and has no order. `null` is equal to a missing value.
    """
    compare, number, truth = _COMPARE[sign], _number(value), _truth(value)
    differs, ordered = sign == "!=", sign not in _EQUALITIES

    def meets(found: Any) -> bool:
        wanted: Any = None
        if found is None:
            return not ordered and (value == "null") != differs
        if isinstance(found, bool):
            found, wanted = (None, None) if ordered else (found, truth)
        elif isinstance(found, (int, float)):
            wanted = number
        elif isinstance(found, str):
            as_number = _number(found) if ordered and number is not None else None
            found, wanted = (as_number, number) if ordered and number is not None else (found, value)
        elif not ordered:
            wanted = _parsed(value)
        return differs if found is None or wanted is None else bool(compare(found, wanted))

    return meets


def _number(text: str) -> int | float | None:
    """Return a number, as an integer if it is written as one; None for other texts."""
    for kind in (int, float):
        try:
            number = kind(text)
        except (ValueError, OverflowError):
            continue
        return None if isnan(number) or "_" in text else number
    return None


def _truth(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
