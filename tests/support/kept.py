"""Where tests keep what takes long to make and is named by all that it depends on: traces, and transformers' tokens."""

from __future__ import annotations

import os
from pathlib import Path


def kept_folder() -> Path:
    """Return HPCDECODE_TEST_CACHE, or hpcdecode-tests in the user's cache directory."""
    return Path(os.environ.get("HPCDECODE_TEST_CACHE") or Path.home() / ".cache" / "hpcdecode-tests")
