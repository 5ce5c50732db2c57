"""How far a sequence has come in the grammar that it must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_PROBLEM_CHARACTERS = 300


class Matcher:
    """How far one sequence has come in its grammar.

    Attributes:
        problem: why llguidance can follow the text no further, or None; the masks mean nothing from then on.
    """

    def __init__(self, state: Any):
        self._state = state
        self._taken = 0
        self.problem: str | None = None

    def allowed(self, generated: Sequence[int], vocabulary: int) -> NDArray[np.bool_]:
        """Return whether each token may come after `generated`, bool [vocabulary].

        Only end-of-sequence tokens may come once the grammar is complete.
        """
        if not self._state.is_stopped():
            self._state.consume_tokens(generated[self._taken :])
        self._taken = len(generated)
        bits = np.zeros(-(-vocabulary // 32), np.int32)
        self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.problem is None and self._state.is_error():
            self.problem = shortened(self._state.get_error())
        return np.unpackbits(bits.view(np.uint8), count=vocabulary, bitorder="little").astype(bool)


def shortened(problem: object) -> str:
    """Return llguidance's words without the state that it appends, on one line."""
    text = str(problem).partition("<state>")[0].partition("<backtrace>")[0]
    return " ".join(text.split())[:_MAX_PROBLEM_CHARACTERS]
