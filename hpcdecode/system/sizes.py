"""Sizes in bytes as users write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `512M` or `64G`, or raise ValueError."""
    match = re.fullmatch(r"(\d+)([kmgt]?)(i?b)?", text.strip().lower())
    if not match:
        raise ValueError(f"expected a size such as 512M or 64G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]
