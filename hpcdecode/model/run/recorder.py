"""What records work for a device, so that it does the same again without being told each part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Unrecordable(Exception):
    """Work waits for the device, or reads something back from it."""


class Recorder(Protocol):
    """What has a device do the same work again and again."""

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Do `work`, and return what does the same again over the same memory.

        Raises:
            Unrecordable: If it cannot be done without the host.
        """
