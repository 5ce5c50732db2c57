"""Whose a request is: with API keys each key is a client, and files and batches belong to the client that made them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from hpcdecode.serve.credentials import given_key

if TYPE_CHECKING:
    from fastapi import Request

_HEX_DIGITS = 32


def owner_of(request: Request, api_keys: Collection[str]) -> str:
    """Return a name for the client of a request that has been let in: a hash of its key, empty without keys."""
    if not api_keys:
        return ""
    return hashlib.sha256(b"hpcdecode client " + given_key(request.headers)).hexdigest()[:_HEX_DIGITS]


def client_of(request: Request, api_keys: Collection[str]) -> str:
    """Return what tells a request's client from others that wait: its key, or its address if there are no keys."""
    return owner_of(request, api_keys) or (request.client.host if request.client else "")
