"""Names of the adapters (LoRA) that rows choose."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"[\w.:+-]{1,200}")


def adapters_problem(names: Iterable[str], tp: int, pp: int) -> str | None:
    """Return why rows cannot choose among adapters of these names, or None if they can.

    Args:
        names: Names of adapters.
        tp: S-ranks that share weights, as `--tp`.
        pp: Stages of S-ranks, as `--pp`.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            return f"expected a name of 1 to 200 letters, digits and signs of ._:+- before the =, got {name!r:.250}"
    for flag, parts in (("--tp", tp), ("--pp", pp)):
        if parts > 1:
            expected = f"{flag} 1, as S-ranks with adapters have whole models"
            return f"expected {expected}, got {parts}; or merge one by --lora DIR"
    return None
