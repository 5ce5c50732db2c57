"""Which R-rank holds a sequence, and whether its KV cache will fit there until its last step.

A sequence of P prompt tokens that starts to decode at step x and runs to step E holds
max(P, final - (E - t)) tokens at step t <= E. The load of an R-rank can only peak where a sequence ends
(FastDecode, Algorithm 1), so it is enough to look at every end step. The blocks of a stem count once, until the
last of the sequences that share it is gone; each of these counts what it holds beyond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hpcdecode.requests.prefix import Prefix, SharedBlocks
from hpcdecode.requests.sequence import SequenceState


class Courses:
    """R-rank, first and last step, and tokens in the end, of sequences: int64 [4, n], in no order."""

    def __init__(self):
        self._rows = np.empty((4, 64), np.int64)
        self._sequences: list[SequenceState] = []
        self._at: dict[SequenceState, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: SequenceState) -> None:
        at = self._at[sequence] = len(self._sequences)
        self._sequences.append(sequence)
        if at == self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], axis=1)
        self._rows[:, at] = sequence.rank, sequence.start_step, sequence.end_step, sequence.final_length

    def remove(self, sequence: SequenceState) -> None:
        """The last one takes its place."""
        at, last = self._at.pop(sequence), self._sequences.pop()
        if last is not sequence:
            self._sequences[at], self._at[last] = last, at
            self._rows[:, at] = self._rows[:, len(self._sequences)]

    def shift(self, steps: int) -> None:
        """All of them start and end so many steps later."""
        self._rows[1:3] += steps

    def reads(self, new: SequenceState, ranks: int, after: int = 0) -> np.ndarray:
        """Tokens that each R-rank attends to for them over the steps in which `new` decodes, float64 [ranks].

        after: leave so many out, those that were added first; none must have been removed.
        """
        rank, start, end, final = self._rows[:, after : len(self)]
        first, last = np.maximum(start, new.start_step), np.minimum(end, new.end_step)
        mean = final - end + (first + last) / 2
        return np.bincount(rank, np.maximum(last - first + 1, 0) * mean, ranks)


class Placement:
    """KV capacity of the R-ranks as one S-rank may use it; shared by all its lanes.

    capacity: tokens per R-rank. block_tokens: unit of allocation, to which every sequence is rounded up.
    speeds: at which R-ranks attend, relative to each other; None where they are alike.
    """

    def __init__(self, capacity: Sequence[int], block_tokens: int, lanes: int, speeds: Sequence[float] | None = None):
        self.capacity, self.largest = tuple(capacity), max(capacity)
        self.block_tokens = block_tokens
        self._speeds = np.ones(len(capacity)) if speeds is None else np.array(speeds, np.float64)
        self._held: list[set[SequenceState | Prefix]] = [set() for _ in capacity]
        self._counts = np.zeros(len(self.capacity), np.int64)  # of those held
        self._tokens = [0] * len(self.capacity)  # that they take in the end
        self._stems: Counter[SharedBlocks] = Counter()
        self._decoding = [Courses() for _ in range(lanes)]

    def tokens(self, sequences: Iterable[SequenceState]) -> int:
        """What sequences take in the end, all together."""
        sequences = list(sequences)
        own = sum(self._round(s.final_length) - s.shared for s in sequences)
        return own + sum(stem.end - stem.start for stem in {s.shared_blocks for s in sequences} - {None})

    def reads(self, new: SequenceState) -> np.ndarray:
        """Tokens that each R-rank attends to for its lane over the steps in which `new` decodes, float64 [ranks]."""
        return self._decoding[new.lane].reads(new, len(self.capacity))

    def order(self, new: SequenceState, reads: np.ndarray) -> Iterator[int]:
        """R-ranks in the order in which they should be tried for a sequence and its followers. reads: of the others.

        The lane waits for the slowest R-rank in every layer: so first the one that takes least time for this lane while
        the sequence decodes, itself included; then the one with fewest sequences of all lanes.
        """
        seconds = (reads + len(new.with_forks) * own_reads(new)) / self._speeds
        least = np.flatnonzero(seconds == seconds.min())
        first = int(least[self._counts[least].argmin()])
        yield first
        yield from (r for r in np.lexsort((self._counts, seconds)).tolist() if r != first)

    def fits(self, rank: int, extra: Iterable[SequenceState | Prefix]) -> bool:
        """Whether R-rank `rank` never overflows with the sequences in `extra` added to those it holds; these have no
        stem in common."""
        extra = list(extra)
        if self._tokens[rank] + self.tokens(extra) <= self.capacity[rank]:
            return True
        return self._peak([*self._held[rank], *extra]) <= self.capacity[rank]

    def add(self, sequence: SequenceState) -> None:
        self._hold(sequence.rank, sequence)
        self._decoding[sequence.lane].add(sequence)

    def remove(self, sequence: SequenceState) -> None:
        self._drop(sequence.rank, sequence)
        self._decoding[sequence.lane].remove(sequence)

    def hold(self, prefix: Prefix) -> None:
        """Count a prefix on its R-ranks."""
        for rank in prefix.ranks:
            self._hold(rank, prefix)

    def drop(self, prefix: Prefix) -> None:
        for rank in prefix.ranks:
            self._drop(rank, prefix)

    def _hold(self, rank: int, sequence: SequenceState | Prefix) -> None:
        self._held[rank].add(sequence)
        self._counts[rank] += 1
        self._tokens[rank] += self._round(sequence.final_length) - sequence.shared
        if stem := sequence.shared_blocks:
            if not self._stems[stem]:
                self._tokens[rank] += stem.end - stem.start
            self._stems[stem] += 1

    def _drop(self, rank: int, sequence: SequenceState | Prefix) -> None:
        self._held[rank].remove(sequence)
        self._counts[rank] -= 1
        self._tokens[rank] -= self._round(sequence.final_length) - sequence.shared
        if stem := sequence.shared_blocks:
            self._stems[stem] -= 1
            if not self._stems[stem]:
                self._tokens[rank] -= stem.end - stem.start
                del self._stems[stem]

    def _round(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _peak(self, sequences: list[SequenceState]) -> int:
        prompt = np.array([s.prompt_length for s in sequences])
        final = np.array([s.final_length for s in sequences])
        end = np.array([s.end_step for s in sequences])
        shared = np.array([s.shared for s in sequences])
        at = np.unique(end + 1)[:, None]  # a slot is freed by the next plan of its lane, one step after the end
        tokens = self._round(np.maximum(prompt, final - np.maximum(end - at, 0))) - shared
        load = np.where(end + 1 >= at, tokens, 0).sum(axis=1)
        for stem, last in _stems(sequences).items():
            load += np.where(last + 1 >= at[:, 0], stem.end - stem.start, 0)
        return int(load.max())


def own_reads(sequence: SequenceState) -> float:
    """Tokens that it attends to itself over the steps in which it decodes."""
    steps = sequence.end_step - sequence.start_step + 1
    return steps * (sequence.final_length - (steps - 1) / 2)


def _stems(sequences: Iterable[SequenceState]) -> dict[SharedBlocks, int]:
    """The stems of sequences, and the last step at which any of these holds them."""
    last: dict[SharedBlocks, int] = {}
    for sequence in sequences:
        if sequence.shared_blocks is not None:
            last[sequence.shared_blocks] = max(last.get(sequence.shared_blocks, -1), sequence.end_step)
    return last
