"""How tokens are guessed ahead of a sequence, for a step to confirm several of them at once (speculative decoding)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Self

METHODS = ("ngram",)
MOST_DRAFTED = 64  # tokens of a sequence in a step


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of speculative decoding, under vLLM's names.

    The method `ngram` (prompt lookup) needs no second model: where the last tokens of a sequence occurred before, in
    its prompt or in what it generated, the tokens that followed there are its draft.

    Attributes:
        method: `ngram`.
        num_speculative_tokens: Most tokens of a draft.
        prompt_lookup_max: Last tokens of a sequence that are looked up, at most; longer matches win.
        prompt_lookup_min: The same, at least.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2

    @classmethod
    def of(cls, given: str | dict[str, Any] | SpeculativeConfig) -> Self:
        """Return settings that are given as a JSON object, its text, or as they are.

        Raises:
            ValueError: If a name is unknown, or a value cannot be used.
        """
        try:
            values = json.loads(given) if isinstance(given, str) else given
            made = msgspec.convert(msgspec.to_builtins(values), cls)
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            names = ", ".join(cls.__struct_fields__)
            raise ValueError(f"expected a JSON object with some of {names}, got {given!r}: {error}") from None
        made.check()
        return made

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if not 1 <= self.num_speculative_tokens <= MOST_DRAFTED:
            expected = f"an integer in [1, {MOST_DRAFTED}]"
            raise ValueError(f"num_speculative_tokens: expected {expected}, got {self.num_speculative_tokens}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            got = f"{self.prompt_lookup_min} and {self.prompt_lookup_max}"
            raise ValueError(f"prompt_lookup_min and prompt_lookup_max: expected 1 <= min <= max, got {got}")
