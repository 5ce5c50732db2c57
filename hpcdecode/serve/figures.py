"""The figures of `/stats`: what a server does now, and how much it has done."""

from __future__ import annotations

import time
from typing import Any

from hpcdecode.serve.context import Context


def figures(context: Context) -> dict[str, Any]:
    """Return the figures of a server: rows, tokens since its start, KV load in tokens."""
    desk, counts = context.desk, context.desk.counts
    return {
        "models": list(context.models),
        "chat": bool(getattr(context.tokenizer.backend, "chat_template", None)),
        "uptime_seconds": max(time.time() - context.created, 0.0),
        "rows": {"running": desk.running, "queued": desk.queued, "done": counts.done, "failed": counts.errors},
        "tokens": {
            "prompt": counts.prompt_tokens,
            "cached": counts.shortcuts.cached_tokens,
            "generated": desk.tokens,
            "drafted": counts.shortcuts.drafted_tokens,
            "confirmed": counts.shortcuts.confirmed_tokens,
        },
        "kv": {"load": desk.load, "capacity": context.kv_capacity},
        "batches": {"running": context.batches.queue.running},
    }
