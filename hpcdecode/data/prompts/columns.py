"""Packs the columns of one row of a prompt file, and says which types the values of a column have.

A packed row is a msgpack array of its prompt and of an object of its columns. Null, booleans, 64-bit integers, floats
and text are stored as such. Everything else is JSON text in an extension value, so that unpacking never recurses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from hpcdecode.errors import RowProblem

# Kinds of values, which are joined bit by bit for all values of a column.
MISSING, BOOL, INT, LONG, FLOAT, TEXT, OTHER = (1 << bit for bit in range(7))
ALL_KINDS = (OTHER << 1) - 1
_EXACT = 1 << 53  # integers up to it are exact as floats; those beyond are LONG
_JSON = 1  # code of the extension
_MIN, _MAX = -(2**63), 2**63 - 1
_PLAIN = (type(None), bool, float, str)
_FIXED = {type(None): MISSING, bool: BOOL, float: FLOAT}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str | None, dict[str, Any]]).decode


def pack(prompt: str | None, columns: bytes) -> bytes:
    """Return a packed row.

    Args:
        prompt: Text of the prompt; None if it is not kept, or if there is none.
        columns: The columns, packed.
    """
    return b"\x92" + _encode(prompt) + columns


def pack_columns(columns: dict[str, Any]) -> bytes:
    """Return the columns of a row packed.

    Args:
        columns: Values by name. Values that JSON does not have become text, bytes become Base64 text.

    Raises:
        RowProblem: A value is nested too deeply.
    """
    return _encode(
        {
            name: v if type(v) in _PLAIN or (type(v) is int and _MIN <= v <= _MAX) else _packed(name, v)
            for name, v in columns.items()
        }
    )


def unpack(packed: bytes) -> tuple[str | None, dict[str, Any]]:
    """Return the prompt and the columns of a packed row; values of kind OTHER are `Ext`, or text with NUL.

    Raises:
        ValueError: It is not a packed row.
    """
    return _decode(packed) if packed else (None, {})


def kind_of(value: Any) -> int:
    """Return the kind of an unpacked value."""
    kind = type(value)
    if kind is str:
        return OTHER if "\0" in value else TEXT
    if kind is int:
        return INT if -_EXACT <= value <= _EXACT else LONG if _MIN <= value <= _MAX else OTHER
    return _FIXED.get(kind, OTHER)


def json_text(value: Any) -> bytes:
    """Return an unpacked value as JSON text."""
    return bytes(value.data) if isinstance(value, Ext) else msgspec.json.encode(value)


def json_object(packed: bytes, shown: Callable[[str], str]) -> bytes:
    """Return a packed row as the JSON text of one object; `shown` returns the name of a column in it."""
    prompt, columns = unpack(packed)
    fields = {} if prompt is None else {"prompt": msgspec.Raw(msgspec.json.encode(prompt))}
    return msgspec.json.encode(fields | {shown(k): msgspec.Raw(json_text(v)) for k, v in columns.items()})


def _packed(name: str, value: Any) -> Any:
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
        return plain if type(plain) in _PLAIN else Ext(_JSON, msgspec.json.encode(plain))
    except RecursionError as e:
        raise RowProblem(f"{name}: expected a value to keep (--keep-columns), got one nested too deeply") from e
