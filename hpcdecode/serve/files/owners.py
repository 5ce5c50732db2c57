"""Whose a request is: with API keys each key is a client, and files and batches belong to the client that made them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import Request

_HEX_DIGITS = 32


def owner_of(request: Request, api_keys: Collection[str]) -> str:
    """Return a name for the client of a request that has been let in: a hash of its key, empty without keys."""
    if not api_keys:
        return ""
    _, _, key = request.headers.get("authorization", "").partition(" ")
    return hashlib.sha256(b"hpcdecode client " + key.strip().encode()).hexdigest()[:_HEX_DIGITS]
