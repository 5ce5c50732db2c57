"""The page at `/`: one static file without any data, and `/stats`, the figures that it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from hpcdecode.serve.context import Context
from hpcdecode.serve.failures import errors
from hpcdecode.serve.figures import figures

_PLACE = Path(__file__).with_name("page.html")


def page_router(context: Context) -> APIRouter:
    """Return the routes. A browser that has given the key for `/` gives it for what the page asks for, too."""
    router = APIRouter()
    source = _PLACE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(source),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(source, headers=headers)

    @router.get("/stats", responses=errors(401))
    def get_stats() -> dict[str, Any]:
        """Say what runs now: rows, tokens since the start, KV load in tokens."""
        return figures(context)

    return router


def policy(source: str) -> str:
    """Return the Content-Security-Policy of a page: its own script and style by their hashes, requests to its host."""
    hashes = [_hash(source, name) for name in ("script", "style")]
    return (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(source: str, name: str) -> str:
    (content,) = re.findall(rf"<{name}>(.*?)</{name}>", source, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
