"""The sequences that a second model follows: what its KV cache holds of each, while there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.base import KvCache
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.spread import in_common

_IDLE = 8  # calls after which a sequence that was not asked for gives up its room, if that is needed


@dataclass(slots=True)
class FollowedSequence:
    """What the KV cache has of a sequence.

    Attributes:
        slot: Of the KV cache.
        given: Tokens that it begins with, int32 [n].
        prefix: Key of the prefix that it shares with other rows, or None.
        skipped: Tokens that it has left out, the first ones.
        known: Tokens of the sequence that it holds, with those that it has left out.
        guessed: Tokens behind those that it holds, as they were guessed.
        call: The last one that asked for a draft.
    """

    slot: int
    given: NDArray[np.int32]
    prefix: int | None = None
    skipped: int = 0
    known: int = 0
    guessed: list[int] = field(default_factory=list)
    call: int = 0


class FollowedSequences:
    """The slots of a KV cache, for sequences that are asked for call by call.

    Of a sequence that becomes too long the last tokens are read again, half as many as a slot may hold: what is near
    tells most of what comes next, and what is far is looked up.

    Args:
        kv_cache: The KV cache, without windows and states.
        slots: Of it.
        most: Tokens of a slot.
        keeps_guesses: Whether guesses that were right need not be read again.
    """

    def __init__(self, kv_cache: KvCache, slots: int, most: int, keeps_guesses: bool = True):
        self.kv_cache, self._most, self._keeps_guesses = kv_cache, most, keeps_guesses
        self._held: dict[tuple[int, int], FollowedSequence] = {}  # by seniority
        self._free = list(reversed(range(slots)))
        self._calls = self._promised = 0

    def __len__(self) -> int:
        """Return how many sequences have slots."""
        return len(self._held)

    def known(self, sequence: SequenceState, first: int = 0) -> int:
        """Return how many tokens need not be read; of a sequence without a slot, those that others surely share.

        Args:
            sequence: The sequence.
            first: Place of its first token that can be read.
        """
        held = self._held.get(sequence.seniority)
        if held is not None and held.known >= first:
            return held.known
        if first:
            return first
        if skipped := self._skipped(len(sequence.given_ids) + len(sequence.generated)):
            return skipped
        known, number, prefix = [0], sequence.seniority[0], sequence.prefix
        if len(sequence.request.sequences) > 1:
            length = len(sequence.given_ids)
            known += [min(other.known, length) for key, other in self._held.items() if key[0] == number]
        if prefix is not None:
            length = prefix.prompt_length
            known += [min(other.known, length) for other in self._held.values() if other.prefix == prefix.key]
        return max(known)

    def begin_call(self) -> None:
        """Begin a call, which asks for some sequences."""
        self._calls, self._promised = self._calls + 1, 0

    def follow(self, sequence: SequenceState, tokens: int, first: int = 0) -> FollowedSequence | None:
        """Return what is held of a sequence, without guesses that were wrong and without its newest token.

        It has room for all of the sequence and so many tokens more. Return None if there is no room.

        Args:
            sequence: The sequence.
            tokens: Those more.
            first: Place of its first token that can be read. If tokens before are not held, all of them are left out.
        """
        length, held = len(sequence.given_ids) + len(sequence.generated) + tokens, self._held.get(sequence.seniority)
        if held is not None and (length - held.skipped > self._most or held.known < first):
            self.forget(sequence)
            held = None
        held = held or self._opened(sequence, max(self._skipped(length), first))
        if held is None:
            return None
        held.call = self._calls
        self._settle(held, sequence.given_ids, sequence.generated)
        if length - held.skipped <= self._most and self._has_room(held, length):
            return held
        self.forget(sequence)
        return None

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is held of a sequence, if there is anything."""
        held = self._held.pop(sequence.seniority, None)
        if held is not None:
            self._give_back(held)

    def forget_all(self) -> None:
        """Drop what is held of all sequences."""
        while self._held:
            self._give_back(self._held.popitem()[1])

    def _give_back(self, held: FollowedSequence) -> None:
        self._free.append(held.slot)
        if held.known > held.skipped or held.guessed:
            self.kv_cache.release([held.slot])

    def _skipped(self, length: int) -> int:
        """Return how many tokens of a sequence of such a length are left out if it is read now."""
        return 0 if length <= self._most else length - self._most // 2

    def _opened(self, sequence: SequenceState, skipped: int) -> FollowedSequence | None:
        """Return a slot for a sequence, with what another holds that begins as it does, unless tokens are left out.

        Return None if no slot is free, and while such a one is still being read: it is read once.
        """
        given = np.array(() if skipped else sequence.given_ids, np.int32)
        alike = {key: in_common(other.given, given) for key, other in self._held.items()}
        nearest = max(alike, key=alike.__getitem__, default=None)
        source, known = None, 0
        if nearest is not None and alike[nearest] >= self.kv_cache.block_tokens:
            source = self._held[nearest]
            known = min(source.known, alike[nearest])
            if known < alike[nearest] and source.call >= self._calls - 1:
                return None
            source.call = self._calls  # which keeps it
        if not self._free and not self._evict():
            return None
        key = sequence.prefix.key if sequence.prefix and not skipped else None
        held = FollowedSequence(self._free.pop(), given, key, skipped, known or skipped, call=self._calls)
        self._held[sequence.seniority] = held
        if source is not None and known:
            self.kv_cache.fork(source.slot, held.slot)
            self.kv_cache.truncate(held.slot, known)
        return held

    def _settle(self, held: FollowedSequence, given: Sequence[int], generated: Sequence[int]) -> None:
        """Drop guesses that were wrong; those that were right are known now. The newest token is left to be read."""
        came = generated[max(held.known - len(given), 0) :] if held.guessed and self._keeps_guesses else ()
        wrong = (i for i, (guess, token) in enumerate(zip(held.guessed, came, strict=False)) if guess != token)
        right = next(wrong, min(len(held.guessed), len(came)))
        kept = min(held.known + right, len(given) + len(generated) - 1)
        if kept < held.known + len(held.guessed):
            self.kv_cache.truncate(held.slot, kept - held.skipped)
        held.known, held.guessed = kept, []

    def _has_room(self, held: FollowedSequence, length: int) -> bool:
        """Return whether a sequence has room to become so long, beside the others of this call; promise it."""
        block = self.kv_cache.block_tokens
        held_blocks = (held.known - held.skipped) // block  # but for the last one, which may be another's, too
        blocks = -(-(length - held.skipped) // block) - held_blocks
        while self.kv_cache.free_blocks < self._promised + blocks:
            if not self._evict():
                return False
        self._promised += blocks
        return True

    def _evict(self) -> bool:
        """Let go of the sequence that has had no draft for longest; return whether there was one that is idle."""
        key = min(self._held, key=lambda key: self._held[key].call, default=None)
        if key is None or self._held[key].call > self._calls - _IDLE:
            return False
        self._give_back(self._held.pop(key))
        return True
