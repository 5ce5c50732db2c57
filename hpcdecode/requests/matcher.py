"""How far a sequence has come in the grammar that it must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MAX_PROBLEM_CHARACTERS = 300


class Matcher:
    """How far one sequence has come in its grammar.

    Args:
        state: LLMatcher of llguidance.

    Attributes:
        state: the same.
        problem: why the text cannot be followed any further, or None; the masks mean nothing from then on.
    """

    def __init__(self, state: Any):
        self.state = state
        self._taken = 0
        self.problem: str | None = None

    def follow(self, generated: Sequence[int]) -> None:
        """Take the tokens of a sequence that are new, of all that it has generated."""
        if not self.state.is_stopped():
            self.state.consume_tokens(generated[self._taken :])
        self._taken = len(generated)

    def forced(self) -> list[int]:
        """Return tokens of what must come next, as the tokenizer writes it; other tokens may spell the same."""
        tokens: list[int] = [] if self.state.is_stopped() else self.state.compute_ff_tokens()
        return tokens

    def allowed(self, tokens: list[int]) -> int:
        """Return how many of these tokens may come next, one after the other."""
        count: int = 0 if self.state.is_stopped() else self.state.validate_tokens(tokens)
        return count

    def note_error(self) -> None:
        """Take over what llguidance says is wrong."""
        if self.problem is None and self.state.is_error():
            self.problem = shortened(self.state.get_error())


def shortened(problem: object) -> str:
    """Return llguidance's words without the state that it appends, on one line."""
    text = str(problem).partition("<state>")[0].partition("<backtrace>")[0]
    return " ".join(text.split())[:_MAX_PROBLEM_CHARACTERS]
