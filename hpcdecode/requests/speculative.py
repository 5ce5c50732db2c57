"""How tokens are guessed ahead of a sequence, for a step to confirm several of them at once (speculative decoding)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Self

DRAFT_MODEL, MTP = "draft_model", "mtp"
LOOKUPS = ("suffix", "ngram")  # methods without a second model
METHODS = (*LOOKUPS, DRAFT_MODEL, MTP)
MOST_DRAFTED = 64  # tokens of a sequence in a step


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of speculative decoding, under vLLM's names.

    Two methods need no second model: where the last tokens of a sequence occurred before, the tokens that followed
    there are its draft. `ngram` (prompt lookup) looks into the sequence's prompt and what it generated, `suffix`
    (suffix decoding) into what other sequences of the S-rank generated as well. With `draft_model` a second, faster
    model goes on with the sequence (Leviathan et al. 2023, Chen et al. 2023), with `mtp` the layer for multi-token
    prediction that the model's checkpoint has beside it (DeepSeek-V3, arXiv:2412.19437).

    Attributes:
        method: One of METHODS; `draft_model` where a model is given, and no method.
        num_speculative_tokens: Most tokens of a draft.
        model: Directory, GGUF file or name of the second model, which has the same tokens. It may be the first itself,
            in fewer bits.
        max_model_len: Most tokens of a sequence that the second model sees. Of a longer one it sees the last ones, from
            half as many up to as many.
        quantization: Form of its projections' weights, as `--weights`; None for that of its checkpoint, with `mtp` for
            that of the model.
        prompt_lookup_max: Last tokens of a sequence that `ngram` looks up, at most; longer matches win.
        prompt_lookup_min: The same, at least.
        suffix_decoding_max_tree_depth: Last tokens of a sequence that `suffix` looks up, at most.
        suffix_decoding_max_cached_requests: Sequences of which others look up what they generated, the newest ones.
        suffix_decoding_min_token_prob: Chance of being right that tokens of a draft have at least.
    """

    method: str = "suffix"
    num_speculative_tokens: int = 16
    model: str | None = None
    max_model_len: int = 4096
    quantization: str | None = None
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 8
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def of(cls, given: str | dict[str, Any] | SpeculativeConfig) -> Self:
        """Return settings that are given as a JSON object, its text, or as they are.

        Raises:
            ValueError: If a name is unknown, or a value cannot be used.
        """
        try:
            values = json.loads(given) if isinstance(given, str) else given
            values = msgspec.to_builtins(values, enc_hook=os.fspath)
            if isinstance(values, dict) and values.get("model") is not None:
                values = {"method": DRAFT_MODEL, **values}
            made = msgspec.convert(values, cls)
        except (json.JSONDecodeError, msgspec.ValidationError, TypeError) as error:
            names = ", ".join(cls.__struct_fields__)
            raise ValueError(f"expected a JSON object with some of {names}, got {given!r}: {error}") from None
        made.check()
        return made

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if (self.method == DRAFT_MODEL) != (self.model is not None):
            raise ValueError(f"method: expected {DRAFT_MODEL} with a model, and no other, got {self.method!r}")
        if self.quantization is not None and self.method in LOOKUPS:
            raise ValueError(f"quantization: expected it with a model or {MTP}, got {self.quantization!r} alone")
        if self.max_model_len < (least := 4 * self.num_speculative_tokens):
            got = f"{self.max_model_len} with num_speculative_tokens {self.num_speculative_tokens}"
            raise ValueError(f"max_model_len: expected {least} or more, four times the tokens of a draft, got {got}")
        for name in ("num_speculative_tokens", "suffix_decoding_max_tree_depth"):
            if not 1 <= (count := getattr(self, name)) <= MOST_DRAFTED:
                raise ValueError(f"{name}: expected an integer in [1, {MOST_DRAFTED}], got {count}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            got = f"{self.prompt_lookup_min} and {self.prompt_lookup_max}"
            raise ValueError(f"prompt_lookup_min and prompt_lookup_max: expected 1 <= min <= max, got {got}")
        if (requests := self.suffix_decoding_max_cached_requests) < 0:
            raise ValueError(f"suffix_decoding_max_cached_requests: expected an integer of at least 0, got {requests}")
        if not 0 <= (chance := self.suffix_decoding_min_token_prob) <= 1:
            raise ValueError(f"suffix_decoding_min_token_prob: expected a number in [0, 1], got {chance}")
