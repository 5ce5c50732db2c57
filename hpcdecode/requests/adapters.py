"""Names of the adapters (LoRA) that rows choose."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"[\w.:+-]{1,200}")


def adapters_problem(names: Iterable[str], tp: int) -> str | None:
    """Return why rows cannot choose among adapters of these names, or None if they can.

    Args:
        names: Names of adapters.
        tp: S-ranks that share each weight, as `--tp`.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            return f"expected a name of 1 to 200 letters, digits and signs of ._:+- before the =, got {name!r:.250}"
    if tp > 1:
        return f"expected --tp 1, as S-ranks with adapters have whole weights, got {tp}; or merge one by --lora DIR"
    return None
