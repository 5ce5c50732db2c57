"""Which R-rank holds a sequence, and whether its KV cache will fit there until its last step.

A sequence of P prompt tokens that starts to decode at step x and runs to step E holds
max(P, final - (E - t)) tokens at step t <= E. The load of an R-rank can only peak at a step in which a sequence ends
(FastDecode, Algorithm 1), so it is enough to look at every end step. Blocks that sequences of a request share count
once, until the last of these sequences is gone; each sequence counts what it holds beyond. A recurrent state counts as
a number of tokens that does not grow. Room is counted in group tokens (`attention/footprint.py`), and windows let
tokens of a sequence and of shared blocks go each by itself. What R-ranks have to do is counted in the tokens that
layers read (`attention/reach.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.reach import ALL_TOKENS, Reach
from hpcdecode.requests.prefix import KvHolder, Prefix, SharedBlocks
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.tally import Tally

Load = NDArray[np.float64]  # tokens by R-rank


class Trajectories:
    """How the attention load of sequences goes on: R-rank, first and last step, and tokens in the end.

    Args:
        reach: tokens that steps read of a sequence.
    """

    def __init__(self, reach: Reach = ALL_TOKENS) -> None:
        self._reach = reach
        self._rows = np.empty((4, 64), np.int64)
        self._sequences: list[SequenceState] = []
        self._at: dict[SequenceState, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: SequenceState) -> None:
        """Count a sequence."""
        at = self._at[sequence] = len(self._sequences)
        self._sequences.append(sequence)
        if at == self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], axis=1)
        self._rows[:, at] = sequence.rank, sequence.start_step, sequence.end_step, sequence.final_length

    def remove(self, sequence: SequenceState) -> None:
        """Count a sequence no longer; the last one takes its place."""
        at, last = self._at.pop(sequence), self._sequences.pop()
        if last is not sequence:
            self._sequences[at], self._at[last] = last, at
            self._rows[:, at] = self._rows[:, len(self._sequences)]

    def shift(self, steps: int) -> None:
        """Let all of them start and end so many steps later."""
        self._rows[1:3] += steps

    def advance(self, sequence: SequenceState, steps: int) -> None:
        """Let one of them start and end so many steps earlier."""
        self._rows[1:3, self._at[sequence]] -= steps

    def attention_load(self, new: SequenceState, ranks: int, after: int = 0) -> Load:
        """Return the tokens that each R-rank reads for them, and their states, over the steps of `new`.

        Args:
            new: whose steps count, those in which it decodes.
            ranks: number of R-ranks.
            after: leaves out so many, those that were added first; none must have been removed.
        """
        rank, start, end, final = self._rows[:, after : len(self)]
        first, last = np.maximum(start, new.start_step), np.minimum(end, new.end_step)
        read = self._reach.over(final - end + first, final - end + last)
        return np.bincount(rank, read, ranks).astype(np.float64, copy=False)

    def beyond(self, most: int, step: int, ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens beyond `most` of those that decode in a step, by R-rank, and how many have any."""
        rank, start, end, final = self._rows[:, : len(self)]
        more = np.where(start <= step, np.maximum(final - end + step - most, 0), 0)
        tokens = np.bincount(rank, more, ranks).astype(np.int64)
        return tokens, np.bincount(rank[more > 0], minlength=ranks)


class Placement:
    """KV capacity of the R-ranks as one S-rank may use it; shared by all its lanes.

    Args:
        capacity: tokens of each R-rank.
        footprint: what a sequence or prefix takes of it.
        lanes: of the S-rank.
        speeds: at which R-ranks attend, relative to each other; None if they are alike.
        reach: tokens that decode steps read of a sequence.

    Attributes:
        lacking: lanes that found no room for their next sequence.
    """

    def __init__(
        self,
        capacity: Sequence[int],
        footprint: Footprint,
        lanes: int,
        speeds: Sequence[float] | None = None,
        reach: Reach = ALL_TOKENS,
    ):
        self.capacity, self.largest = tuple(capacity), max(capacity)
        self.footprint, self.reach = footprint, reach
        self._room = [tokens * footprint.groups for tokens in capacity]
        self._speeds = np.ones(len(capacity)) if speeds is None else np.array(speeds, np.float64)
        self._held: list[set[KvHolder]] = [set() for _ in capacity]
        self._counts = np.zeros(len(self.capacity), np.int64)  # of those held
        self._final = Tally(len(self.capacity), footprint)  # what they take in the end
        self._decoding = [Trajectories(reach) for _ in range(lanes)]
        self.lacking: set[int] = set()

    @property
    def block_tokens(self) -> int:
        """Return the unit of allocation, to which every sequence is rounded up."""
        return self.footprint.block_tokens

    def tokens(self, holders: Iterable[KvHolder]) -> int:
        """Return what sequences and prefixes take of a capacity in the end, all together."""
        return -(-self._taken(list(holders)) // self.footprint.groups)

    def attention_load(self, new: SequenceState) -> Load:
        """Return the tokens that each R-rank reads for `new`'s lane over the steps in which it decodes."""
        return self._decoding[new.lane].attention_load(new, len(self.capacity))

    def beyond(self, most: int, lane: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens beyond `most` of a lane's sequences that decode in a step, by R-rank, and their number."""
        return self._decoding[lane].beyond(most, step, len(self.capacity))

    def order(self, new: SequenceState, load: Load) -> Iterator[int]:
        """Yield the R-ranks in the order in which they should be tried for a sequence and its forks.

        The lane waits for the slowest R-rank in every layer. So first comes the one that takes least time for this lane
        while the sequence decodes, itself included; then the one with fewest sequences of all lanes.

        Args:
            new: the sequence.
            load: attention load of the others, by R-rank.
        """
        seconds = (load + len(new.with_forks) * own_load(new, self.reach)) / self._speeds
        least = np.flatnonzero(seconds == seconds.min())
        first = int(least[self._counts[least].argmin()])
        yield first
        yield from (r for r in np.lexsort((self._counts, seconds)).tolist() if r != first)

    def fits(self, rank: int, extra: Iterable[KvHolder]) -> bool:
        """Return whether R-rank `rank` never overflows with `extra` added to those it holds.

        They share no blocks with those it holds but prefixes.
        """
        extra = list(extra)
        if self._final.tokens[rank] + self._taken(extra) <= self._room[rank]:
            return True
        return self._peak([*self._held[rank], *extra]) <= self._room[rank]

    def holds_alone(self, rank: int, sequence: SequenceState) -> bool:
        """Return whether an R-rank has room for all that a sequence may take, if it holds nothing else."""
        return self.footprint.tokens(sequence.final_length) <= self._room[rank]

    def add(self, sequence: SequenceState) -> None:
        """Count a sequence on its R-rank."""
        self._hold(sequence.rank, sequence)
        self._decoding[sequence.lane].add(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Count a sequence no longer."""
        self._drop(sequence.rank, sequence)
        self._decoding[sequence.lane].remove(sequence)

    def start(self, sequences: Iterable[SequenceState], now: int) -> None:
        """Let sequences that have not started to decode begin at step `now`."""
        for sequence in sequences:
            self.remove(sequence)
            sequence.start_step = now
            self.add(sequence)

    def try_ahead(self, rank: int, sequences: Sequence[SequenceState], tokens: Sequence[int]) -> bool:
        """Let sequences of an R-rank hold so many tokens more than their courses say, if there is room.

        Whatever becomes of these tokens, none holds more then, or ends later. Return whether there is room.
        """
        for sequence, more in zip(sequences, tokens, strict=True):
            sequence.draft.ahead = more
        if self.fits(rank, ()):
            return True
        for sequence in sequences:
            sequence.draft.ahead = 0
        return False

    def advance(self, sequence: SequenceState, steps: int) -> None:
        """Count a sequence, ahead no more, that gained so many tokens beside one a step, as if it had begun earlier."""
        sequence.draft.ahead = 0
        sequence.start_step -= steps
        self._decoding[sequence.lane].advance(sequence, steps)

    def may_start(self, sequences: Sequence[SequenceState], step: int) -> bool:
        """Return whether sequences that have not started to decode have room if they begin at `step`."""
        before = [s.start_step for s in sequences]
        self.start(sequences, step)
        fits = all(self.fits(rank, ()) for rank in {s.rank for s in sequences})
        for sequence, start in zip(sequences, before, strict=True):
            self.start([sequence], start)
        return fits

    def hold(self, prefix: Prefix) -> None:
        """Count a prefix on its R-ranks."""
        for rank in prefix.ranks:
            self._hold(rank, prefix)

    def drop(self, prefix: Prefix) -> None:
        """Count a prefix no longer."""
        for rank in prefix.ranks:
            self._drop(rank, prefix)

    def _hold(self, rank: int, holder: KvHolder) -> None:
        self._held[rank].add(holder)
        self._counts[rank] += 1
        self._final.add(rank, self._own(holder), holder.shared_blocks)

    def _drop(self, rank: int, holder: KvHolder) -> None:
        self._held[rank].remove(holder)
        self._counts[rank] -= 1
        self._final.remove(rank, self._own(holder), holder.shared_blocks)

    def _taken(self, holders: Sequence[KvHolder]) -> int:
        """Return the group tokens that sequences and prefixes take in the end."""
        shared = {s.shared_blocks for s in holders if s.shared_blocks}
        return sum(map(self._own, holders)) + sum(self.footprint.of_blocks(blocks.tokens) for blocks in shared)

    def _own(self, holder: KvHolder) -> int:
        """Return the group tokens that a sequence or prefix takes in the end beside those that it shares."""
        return self.footprint.tokens(holder.final_length, holder.shared)

    def _peak(self, holders: list[KvHolder]) -> int:
        """Return the most group tokens that they take at any step."""
        prompt, final, end = self._courses(holders)
        shared, ahead = np.array([(s.shared, s.ahead) for s in holders]).T
        at = np.unique(end + 1)[:, None]  # a slot is freed by the next plan of its lane, one step after the end
        held = np.minimum(np.maximum(prompt, final - np.maximum(end - at, 0)) + ahead, final)
        load = np.where(end + 1 >= at, self.footprint.tokens(held, shared), 0).sum(axis=1)
        for blocks, last in _last_steps(holders, end.tolist()).items():
            load += np.where(last + 1 >= at[:, 0], self.footprint.of_blocks(blocks.tokens), 0)
        return int(load.max())

    def _courses(self, holders: list[KvHolder]) -> NDArray[np.int64]:
        """Return tokens at first, tokens in the end and last step of each, int64 [3, holders]."""
        courses: NDArray[np.int64] = np.array([(s.prompt_length, s.final_length, s.end_step) for s in holders]).T
        return courses

    # What follows is for placements that expect sequences to end early. Room that is reserved never runs out.

    def expected_share(self, tokens: int) -> float:
        """Return what share of its max_tokens, given as `tokens`, a row is expected to take."""
        return 1.0

    def may_enter(self, sequence: SequenceState) -> bool:
        """Return whether no sequence waits that must enter before this one, whatever its lane."""
        return True

    def grow(self, lane: int, now: int) -> None:
        """Claim room for the step after `now` of a lane's sequences; have others leave if there is none."""

    def leaving(self, lane: int) -> list[SequenceState]:
        """Return the sequences of a lane that must give up their room with its next plan."""
        return []

    def has_leaving(self, lane: int) -> bool:
        """Return whether sequences of a lane must give up their room with its next plan."""
        return False

    def await_room(self, sequences: Sequence[SequenceState]) -> None:
        """Take note that sequences have left, and wait to enter again."""

    def ended(self, sequence: SequenceState) -> None:
        """Take note that a sequence is finished; its lane's next plan frees its room."""

    def check(self) -> None:
        """Raise InvariantViolation if what is claimed does not fit, or was counted wrong."""


def own_load(sequence: SequenceState, reach: Reach) -> float:
    """Return the tokens that the steps in which a sequence decodes read of it, and of its state."""
    steps = sequence.end_step - sequence.start_step + 1
    return float(reach.over(sequence.final_length - steps + 1, sequence.final_length))


def _last_steps(holders: Iterable[KvHolder], ends: Iterable[int]) -> dict[SharedBlocks, int]:
    """Return, by shared blocks, the last step at which any of `holders`, with their last steps, holds them."""
    last: dict[SharedBlocks, int] = {}
    for holder, end in zip(holders, ends, strict=True):
        if blocks := holder.shared_blocks:
            last[blocks] = max(last.get(blocks, -1), end)
    return last
