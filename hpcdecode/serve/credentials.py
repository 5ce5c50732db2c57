"""The key that a request gives: as its bearer token, or as the password that a browser has asked for."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import urlsplit

from starlette.datastructures import Headers

CHALLENGES = (("WWW-Authenticate", "Bearer"), ("WWW-Authenticate", 'Basic realm="hpcdecode", charset="UTF-8"'))
_SAFE = ("GET", "HEAD", "OPTIONS")


def given_key(headers: Headers) -> bytes:
    """Return the key that a request gives, empty for none. The user's name of Basic authentication does not matter."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    given = given.strip()
    if scheme.lower() == "bearer":
        return given.encode("latin-1")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given.encode("latin-1"), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def is_forged(method: str, headers: Headers) -> bool:
    """Return whether another site's page may have made a browser send a request with the password that it keeps.

    Browsers add it to what any page sends. They say which page that is, and the answer is hidden from it.
    """
    if method in _SAFE or headers.get("authorization", "")[:6].lower() != "basic ":
        return False
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
