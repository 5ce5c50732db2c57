"""How far a sequence has come in the grammar that it must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_PROBLEM_CHARACTERS = 300


class Matcher:
    """How far one sequence has come in its grammar.

    Args:
        state: LLMatcher of llguidance.
        tokens: number of its tokens, those of the tokenizer and of the model.

    Attributes:
        problem: why the text cannot be followed any further, or None; the masks mean nothing from then on.
    """

    def __init__(self, state: Any, tokens: int):
        self._state, self._tokens = state, tokens
        self._taken = 0
        self.problem: str | None = None

    def allowed(self, generated: Sequence[int], vocabulary: int) -> NDArray[np.bool_]:
        """Return whether each token may come after `generated`, bool [vocabulary].

        Only end-of-sequence tokens may come once the grammar is complete. A tokenizer may have more tokens than the
        model has logits; if none but those may come, that is a problem.
        """
        if not self._state.is_stopped():
            self._state.consume_tokens(generated[self._taken :])
        self._taken = len(generated)
        bits = np.zeros(-(-self._tokens // 32), np.int32)
        self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.problem is None and self._state.is_error():
            self.problem = shortened(self._state.get_error())
        allowed = np.unpackbits(bits.view(np.uint8), count=self._tokens, bitorder="little").astype(bool)
        if self.problem is None and allowed.any() and not allowed[:vocabulary].any():
            self.problem = f"none of the model's {vocabulary} tokens may come next"
        return allowed[:vocabulary]


def shortened(problem: object) -> str:
    """Return llguidance's words without the state that it appends, on one line."""
    text = str(problem).partition("<state>")[0].partition("<backtrace>")[0]
    return " ".join(text.split())[:_MAX_PROBLEM_CHARACTERS]
