"""Checks of the types of sampling fields, as rows, job files and callers give them."""

from __future__ import annotations

from typing import Any

from hpcdecode.errors import RowProblem
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.requests.values import is_integer, shown, type_name

MAX_INTEGER = 2**63 - 1


def typed(name: str, kind: Any, value: Any) -> Any:
    """Return a decoded value as a type of SamplingParams. Integers become floats; nothing else is converted.

    Args:
        name: Name of the field, for the error message.
        kind: A type that SamplingParams has, such as `tuple[int, ...]`.
        value: Value of the field, as JSON or TOML was decoded.

    Raises:
        RowProblem: The value is not of this type.
    """
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, int | None) and is_integer(value) and abs(value) <= MAX_INTEGER:
        return value
    if kind is float and (is_integer(value) or isinstance(value, float)):
        return _as_float(name, value)
    if kind is str and isinstance(value, str):
        return value
    if kind == tuple[int, ...] and isinstance(value, (list, tuple)):
        return tuple(typed(f"{name}[{index}]", int, element) for index, element in enumerate(value))
    if kind == tuple[str, ...] and isinstance(value, (str, list, tuple)):
        elements = [value] if isinstance(value, str) else value
        return tuple(typed(f"{name}[{index}]", str, element) for index, element in enumerate(elements))
    if kind == dict[int, float] and isinstance(value, dict):
        return {_token_id(name, key): typed(f"{name}[{key}]", float, element) for key, element in value.items()}
    if kind == dict[str, str] and isinstance(value, dict):
        return {key: typed(f"{name}.{key}", str, element) for key, element in value.items()}
    if kind == dict[str, Any] | None and isinstance(value, dict):
        return {key: element for key, element in value.items() if element is not None}
    raise RowProblem(f"{name}: expected {_KINDS.get(kind, 'a 64-bit integer')}, got {type_name(value)} {shown(value)}")


_KINDS = {
    bool: "true or false",
    float: "a number",
    str: "a string",
    tuple[int, ...]: "a list of integers",
    tuple[str, ...]: "a string or a list of strings",
    dict[int, float]: "an object of token ids and numbers",
    dict[str, str]: "an object of names and strings",
    dict[str, Any] | None: "an object",
    SpeculativeConfig: "an object",
}


def _token_id(name: str, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 19):
        raise RowProblem(f"{name}: expected token ids as keys, got {shown(key)}")
    return int(key)


def _as_float(name: str, value: int | float) -> float:
    try:
        return float(value)
    except OverflowError as e:
        raise RowProblem(f"{name}: expected a finite number, got {shown(value)}") from e
