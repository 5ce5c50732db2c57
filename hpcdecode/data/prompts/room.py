"""The room that a prompt has in the model's context."""

from __future__ import annotations

from hpcdecode.errors import RowProblem


def room_for_prompt(max_tokens: int, max_positions: int) -> int:
    """Return the positions that are left for a prompt beside `max_tokens` new tokens."""
    if max_tokens >= max_positions:
        raise RowProblem(
            f"truncate_prompt_tokens: expected room for a prompt, got a context of {max_positions} tokens and "
            f"max_tokens {max_tokens}; lower max_tokens"
        )
    return max_positions - max_tokens


def require_room(length: int, qualifier: str, max_positions: int) -> None:
    """Raise RowProblem if a prompt of so many tokens leaves no position for a new one; `qualifier` precedes it."""
    if length >= max_positions:
        raise RowProblem(
            f"prompt too long: expected at most {max_positions - 1} tokens (the model's context of {max_positions}"
            f" less one new token), got {qualifier}{length}"
        )
