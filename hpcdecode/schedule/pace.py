"""How many prompt tokens a step may have so that rows in flight do not wait long for their next tokens."""

from __future__ import annotations

LEAST_TOKENS = 256  # of a step; GEMMs over fewer are less efficient
_WEIGHT = 0.25  # of the newest step in the means


class Pace:
    """Bounds the prompt tokens of a step by what steps took (the latency bound of FluidInfer).

    A step takes `a` seconds for its decodes and `b` for each prompt token, both means of the steps so far. So it may
    have (max_gap - a) / b prompt tokens.

    Args:
        max_gap: Seconds that a step should take at most while rows decode; None or 0 for any number.
        most: Prompt tokens of a step at most.
        parts: Lanes that take turns: between two tokens of a row there is a step of each.
    """

    def __init__(self, max_gap: float | None, most: int, parts: int = 1):
        self._gap, self._most = max_gap / parts if max_gap else None, most
        self._decodes: float | None = None  # seconds of a step without prompts
        self._token: float | None = None  # seconds of a prompt token

    @property
    def tokens(self) -> int:
        """Return the most prompt tokens of the next step beside decodes."""
        if self._gap is None or self._token is None:
            return self._most
        left = self._gap - (self._decodes or 0.0)
        return min(max(int(left / self._token), LEAST_TOKENS), self._most)

    def observe(self, seconds: float, prompt_tokens: int, decodes: int) -> None:
        """Take note of what a step of so many prompt tokens and decodes took."""
        if not prompt_tokens:
            self._decodes = _mean(self._decodes, seconds)
        elif prompt_tokens >= LEAST_TOKENS:
            others = min(self._decodes or 0.0, seconds / 2) if decodes else 0.0
            self._token = _mean(self._token, (seconds - others) / prompt_tokens)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)
