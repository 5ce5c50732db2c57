"""What belongs to a sequence beside its tokens: what its text hides, its sampler's state, its draft, its times."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdecode._ops_cpu import TokenHistory
from hpcdecode.requests.counts import TokenCounts
from hpcdecode.requests.matcher import Matcher
from hpcdecode.requests.stops import StopText


@dataclass(slots=True)
class Hidden:
    """What the text of a sequence leaves out: its last tokens, and the last characters of the rest's text."""

    tokens: int = 0
    characters: int = 0


@dataclass(slots=True)
class SamplerState:
    """What a sequence keeps for its sampling parameters from token to token, each from its first use on."""

    counts: TokenCounts | None = None  # for penalties
    stop_text: StopText | None = None  # for stop strings
    matcher: Matcher | None = None  # for structured outputs
    thought: bool = False  # its reasoning has ended, or does not begin


@dataclass(slots=True)
class DraftState:
    """What a sequence may go on with, and how often that was right.

    Attributes:
        tokens: That the next step confirms or not, behind the newest one; none outside of a step.
        length: Tokens in the KV cache before that step.
        ahead: Tokens that the KV cache may hold beyond the sequence's course, until a plan drops those that were wrong.
        history: All tokens of the sequence, from its first draft on.
    """

    tokens: list[int] = field(default_factory=list)
    length: int = 0
    ahead: int = 0
    history: TokenHistory | None = None


@dataclass(slots=True)
class Times:
    """Unix times: the prefill began, the first token came, the last token came."""

    queued: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
