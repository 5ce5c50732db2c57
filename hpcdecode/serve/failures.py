"""Answers to requests that fail, as the published OpenAPI schema has them."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT, "code": _TEXT},
    "required": ["message", "type"],
    "additionalProperties": False,
}
_BODY = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}
_STATUSES = {
    400: "The request cannot be used.",
    401: "The key is missing.",
    404: "There is no such model, file or batch.",
    409: "It is in use, or has ended.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The engine has failed.",
    503: "The server is about to end.",
    507: "The disk is full.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers to requests that fail, by status."""
    content = {"application/json": {"schema": _BODY}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}
