"""Which R-rank holds a sequence, and whether its KV cache will fit there until its last step.

A sequence of P prompt tokens that starts to decode at step x and runs to step E holds
max(P, final - (E - t)) tokens at step t <= E. The load of an R-rank can only peak where a sequence ends
(FastDecode, Algorithm 1), so it is enough to look at every end step. The blocks of a stem count once, until the
last of the sequences that share it is gone; each of these counts what it holds beyond.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from hpcdecode.schedule.prefixes import Prefix
from hpcdecode.schedule.sequence import Sequence, Stem


class Placement:
    """KV capacity of the R-ranks as one S-rank may use it; shared by all its lanes.

    capacity: tokens per R-rank. block_tokens: unit of allocation, to which every sequence is rounded up.
    """

    def __init__(self, capacity: Seq[int], block_tokens: int, lanes: int):
        self.capacity = tuple(capacity)
        self.block_tokens = block_tokens
        self._held: list[set[Sequence | Prefix]] = [set() for _ in capacity]
        self._decoding: list[dict[Sequence, tuple[int, ...]]] = [{} for _ in range(lanes)]  # their courses, by lane

    def tokens(self, sequences: Iterable[Sequence]) -> int:
        """What sequences take in the end, all together."""
        sequences = list(sequences)
        own = sum(self._round(s.final_length) - s.shared for s in sequences)
        return own + sum(stem.end - stem.start for stem in {s.stem for s in sequences} - {None})

    def candidates(self, new: Sequence, group: Seq[Sequence] = ()) -> list[int]:
        """R-ranks in the order in which they should be tried for a sequence whose first step is known.

        The lane waits for the slowest R-rank in every layer: so first the one that reads least for this lane while the
        sequence decodes, by the tokens that its others will hold; then the one with fewest sequences of all lanes.
        group: sequences of the lane that have been placed but not added yet.
        """
        ranks = range(len(self.capacity))
        courses = [*self._decoding[new.lane].values(), *(_course(s) for leader in group for s in leader.branch)]
        load = _tokens_read(courses, new, len(ranks))
        return sorted(ranks, key=lambda r: (load[r], len(self._held[r]), r))

    def fits(self, rank: int, extra: Iterable[Sequence | Prefix]) -> bool:
        """Whether R-rank `rank` never overflows with the sequences in `extra` added to those it holds."""
        sequences = [*self._held[rank], *extra]
        if self.tokens(sequences) <= self.capacity[rank]:
            return True
        return self._peak(sequences) <= self.capacity[rank]

    def add(self, sequence: Sequence) -> None:
        self._held[sequence.rank].add(sequence)
        self._decoding[sequence.lane][sequence] = _course(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._held[sequence.rank].remove(sequence)
        del self._decoding[sequence.lane][sequence]

    def hold(self, prefix: Prefix) -> None:
        """Count a prefix on its R-ranks."""
        for rank in prefix.ranks:
            self._held[rank].add(prefix)

    def drop(self, prefix: Prefix) -> None:
        for rank in prefix.ranks:
            self._held[rank].remove(prefix)

    def _round(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _peak(self, sequences: list[Sequence]) -> int:
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


def _stems(sequences: Iterable[Sequence]) -> dict[Stem, int]:
    """The stems of sequences, and the last step at which any of these holds them."""
    last: dict[Stem, int] = {}
    for sequence in sequences:
        if sequence.stem is not None:
            last[sequence.stem] = max(last.get(sequence.stem, -1), sequence.end_step)
    return last


def _course(sequence: Sequence) -> tuple[int, ...]:
    """R-rank, first and last step, tokens in the end; settled once it is placed."""
    return sequence.rank, sequence.start_step, sequence.end_step, sequence.final_length


def _tokens_read(courses: Seq[tuple[int, ...]], new: Sequence, ranks: int) -> list[float]:
    """Tokens of the sequences with these courses that each R-rank attends to over the steps in which `new` decodes."""
    if not courses:
        return [0.0] * ranks
    rank, start, end, final = np.array(courses).T
    first, last = np.maximum(start, new.start_step), np.minimum(end, new.end_step)
    mean = final - end + (first + last) / 2
    return np.bincount(rank, np.maximum(last - first + 1, 0) * mean, ranks).tolist()
