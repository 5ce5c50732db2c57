"""Tokens whose log-probabilities a row asks for, and what is known of them: no token is generated for such a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from hpcdecode.requests.logprobs import Logprobs


class Target(msgspec.Struct, array_like=True):
    """Tokens to prefill, of which those from `start` on are scored, and tokens that may come next, scored too.

    Continuations of the same prompt that differ in their last token are one target.

    Attributes:
        input_ids: At least `start` tokens.
        start: The first scored token, at least 1: the first token of a text has no log-probability.
        last: Tokens that come after `input_ids`, each the last of another continuation, at least one.
        samples: By token of `last`, the number of its continuation.
    """

    input_ids: list[int]
    start: int
    last: list[int]
    samples: list[int]

    @staticmethod
    def of(token_ids: list[int], start: int, sample: int) -> Target:
        """Return the target of a continuation: the tokens of `token_ids` from `start` on."""
        return Target(token_ids[:-1], start, token_ids[-1:], [sample])


@dataclass(slots=True, eq=False)
class Scores:
    """Log-probabilities of a target's tokens as far as they are computed.

    Attributes:
        body: Of `input_ids` from `start` on.
        ends: Of `last`, once the body is complete.
        greedy: By entry of `body`, whether the token is the one that greedy decoding takes; the same of `ends`.
    """

    body: Logprobs = field(default_factory=Logprobs)
    ends: Logprobs = field(default_factory=Logprobs)
    greedy: list[bool] = field(default_factory=list)
    greedy_ends: list[bool] = field(default_factory=list)


def joined(targets: Sequence[Target]) -> list[Target]:
    """Return targets of which those that have the same tokens but for the last are one."""
    found: dict[tuple[int, tuple[int, ...]], Target] = {}
    for target in targets:
        same = found.setdefault((target.start, tuple(target.input_ids)), target)
        if same is not target:
            same.last += target.last
            same.samples += target.samples
    return list(found.values())
