"""Names of the adapters (LoRA) that rows choose."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"[\w.:+-]{1,200}")


def adapters_problem(names: Iterable[str]) -> str | None:
    """Return why rows cannot choose among adapters of these names, or None if they can."""
    for name in names:
        if not _NAME.fullmatch(name):
            return f"expected a name of 1 to 200 letters, digits and signs of ._:+- before the =, got {name!r:.250}"
    return None
