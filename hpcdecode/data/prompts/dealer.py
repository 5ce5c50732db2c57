"""Deals rows out to lanes and S-ranks: those whose prompts begin alike go to one, which prefills that once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from hpcdecode.requests.prompt import Prompt

_MOST_ROWS = 32  # that wait for one taker
_MOST_TOKENS = 1 << 20  # of prompts that wait, of all takers
_LEAST_SHARED = 64  # tokens


class PromptSource(Protocol):
    """Where rows come from."""

    def peek(self) -> Prompt | None:
        """Return the next prompt, which stays there, or None if there is none at the moment."""

    def at_hand(self) -> Prompt | None:
        """Return the next prompt if it can be had at once, which stays there, or None."""

    def pop(self) -> Prompt:
        """Take the next prompt."""


class PromptList:
    """A source that prompts are added to."""

    def __init__(self) -> None:
        self._prompts: deque[Prompt] = deque()

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Append prompts."""
        self._prompts += prompts

    def peek(self) -> Prompt | None:
        """Return the next prompt, which stays, or None if there is none."""
        return self._prompts[0] if self._prompts else None

    at_hand = peek

    def pop(self) -> Prompt:
        """Take the next prompt."""
        return self._prompts.popleft()


class Dealer:
    """Hands of rows, one for each taker. Nobody waits while there are rows: they come from the hands of others at last.

    Args:
        source: Of the rows, in an order in which those that begin alike are neighbours.
    """

    def __init__(self, source: PromptSource):
        self._source = source
        self._hands: dict[int, deque[Prompt]] = {}
        self._last: dict[int, Prompt] = {}  # that a taker was dealt
        self._tokens = 0

    @property
    def waiting(self) -> int:
        """Return how many rows are dealt and not taken yet."""
        return sum(map(len, self._hands.values()))

    def hand(self, taker: int) -> Sequence[Prompt]:
        """Return what a taker was dealt and has not taken yet."""
        return self._hands.get(taker, ())

    def give(self, taker: int, prompts: Sequence[Prompt]) -> None:
        """Deal prompts to one taker."""
        self._hands.setdefault(taker, deque()).extend(prompts)
        self._tokens += sum(len(prompt.token_ids) for prompt in prompts)

    def peek(self, taker: int) -> Prompt | None:
        """Return the next prompt of a taker, which stays in its hand, or None if no row is left at the moment."""
        hand = self._hands.setdefault(taker, deque())
        while not hand and (prompt := self._source.peek()) is not None:
            owner = self._owner(prompt, taker)
            self.give(owner, [self._source.pop()])
            self._last[owner] = prompt
        if not hand and (longest := max(self._hands.values(), key=len)):
            hand += _later_half(longest)
            self._last[taker] = hand[-1]
        return hand[0] if hand else None

    def at_hand(self, taker: int) -> Prompt | None:
        """Return the next prompt of a taker, or of any if its hand is empty; it stays, and nobody waits for one."""
        hand = self._hands.get(taker)
        return hand[0] if hand else self._source.at_hand()

    def pop(self, taker: int) -> Prompt:
        """Take the next prompt of a taker; there must be one."""
        self.peek(taker)
        prompt = self._hands[taker].popleft()
        self._tokens -= len(prompt.token_ids)
        return prompt

    def drop(self, taker: int) -> list[Prompt]:
        """Forget a taker, and return the prompts of its hand."""
        self._last.pop(taker, None)
        hand = self._hands.pop(taker, deque())
        self._tokens -= sum(len(prompt.token_ids) for prompt in hand)
        return list(hand)

    def _owner(self, prompt: Prompt, taker: int) -> int:
        """Return whose hand a prompt goes to: that of one who goes on with it, if it has room, else the taker's."""
        if self._tokens > _MOST_TOKENS:
            return taker
        alike = [other for other, last in self._last.items() if begin_alike(prompt, last)]
        if taker in alike:
            return taker
        return next((other for other in alike if len(self._hands[other]) < _MOST_ROWS), taker)


def _later_half(hand: deque[Prompt]) -> list[Prompt]:
    """Take the later half of a hand. Its rows begin alike, and each one who has some of them prefills that once."""
    half = [hand.pop() for _ in range((len(hand) + 1) // 2)]
    return half[::-1]


def begin_alike(prompt: Prompt, other: Prompt) -> bool:
    """Return whether the first half of a prompt is what another one begins with, too."""
    half = len(prompt.token_ids) // 2
    if half < _LEAST_SHARED or prompt.adapter != other.adapter:
        return False
    return all(prompt.token_ids[:count] == other.token_ids[:count] for count in (_LEAST_SHARED, half))
