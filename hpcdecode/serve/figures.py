"""The figures of `/stats`: what a server does now, and how much it has done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hpcdecode.engine.live import LiveDesk


def figures(desk: LiveDesk, models: Sequence[str], capacity: int, created: float) -> dict[str, Any]:
    """Return the figures of a server.

    Args:
        desk: Its live desk.
        models: Names of the model, the first of which is shown.
        capacity: Tokens that the KV caches have room for.
        created: Unix time of the start.
    """
    counts = desk.counts
    return {
        "models": list(models),
        "chat": bool(getattr(desk.tokenizer.backend, "chat_template", None)),
        "uptime_seconds": max(time.time() - created, 0.0),
        "rows": {"running": desk.running, "queued": desk.queued, "done": counts.done, "failed": counts.errors},
        "tokens": {"prompt": counts.prompt_tokens, "generated": desk.tokens},
        "kv": {"load": desk.load, "capacity": capacity},
    }
