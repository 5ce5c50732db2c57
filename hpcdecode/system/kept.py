"""Where files are kept from run to run. Any of them may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def directory() -> Path:
    """Return the cache directory: HPCDECODE_CACHE, or hpcdecode in the user's cache directory."""
    if own := os.environ.get("HPCDECODE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcdecode"
