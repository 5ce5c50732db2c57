"""Optimistic admission: rows enter by the lengths that are expected of them, and the youngest leave if room runs out.

A sequence claims the blocks that it holds after the next step of its lane. Claims never exceed the capacity: when a
plan raises them, sequences are chosen that leave with the next plan of their lanes, which comes before the step that
needs the room. They are the youngest. A sequence that left waits, with its tokens, and enters again before any younger
one of any lane. Once it has left `MOST_PREEMPTIONS` times it enters with room for all that it may take, and leaves no
more. So what is in flight comes to its end, and then the oldest sequence that waits has room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.reach import ALL_TOKENS, Reach
from hpcdecode.errors import InvariantViolation
from hpcdecode.requests.prefix import KvHolder
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.expected import GeneratedLengths
from hpcdecode.schedule.placement import Placement, _last_steps
from hpcdecode.schedule.tally import Tally

MOST_PREEMPTIONS = 3
MARGIN = 2.0  # standard deviations of the expected load
_HELD = 0, 0, True  # start, tokens, and that it reserves, of a prefix
_AHEAD = np.unique((1.15 ** np.arange(75)).astype(np.int64))  # steps to look at, up to 31,000
_LOOKS = 32
_STALE = 16  # steps after which lengths are estimated anew, if none ended meanwhile


@dataclass(slots=True, eq=False)
class Claim:
    """What a sequence or prefix claims on an R-rank.

    Attributes:
        tokens: of whole blocks that a sequence may fill until it claims more.
        own: group tokens, beside those that it shares.
        live: whether it is held.
        due: entry among the steps at which it grows that counts; others are out of date.
        leaves: whether it is given up with the next plan of its lane.
    """

    holder: KvHolder
    rank: int
    tokens: int
    own: int
    live: bool = True
    due: int = -1
    leaves: bool = False


class OptimisticPlacement(Placement):
    """A placement by expected lengths, with the arguments of `Placement`.

    Attributes:
        lengths: of sequences that have ended.
    """

    def __init__(
        self,
        capacity: Sequence[int],
        footprint: Footprint,
        lanes: int,
        speeds: Sequence[float] | None = None,
        reach: Reach = ALL_TOKENS,
    ):
        super().__init__(capacity, footprint, lanes, speeds, reach)
        self.lengths = GeneratedLengths()
        self._claims: list[dict[KvHolder, Claim]] = [{} for _ in capacity]
        self._claimed, self._staying = self._tally(), self._tally()
        self._growth: list[list[tuple[int, int, Claim]]] = [[] for _ in range(lanes)]  # heaps by step
        self._ties = count()
        self._leaving: list[list[SequenceState]] = [[] for _ in range(lanes)]
        self._waiting: set[SequenceState] = set()
        self._now = self._estimated = 0
        self._changed = False  # since lengths were estimated

    @property
    def claimed(self) -> list[int]:
        """Return the group tokens that are claimed of every R-rank, those included that are about to be given up."""
        return list(self._claimed.tokens)

    def expected_share(self, tokens: int) -> float:
        """Return what share of its max_tokens, given as `tokens`, a row is expected to take."""
        self._estimate()
        return self.lengths.share(tokens)

    def fits(self, rank: int, extra: Iterable[KvHolder]) -> bool:
        """Return whether `extra` has room now, and is expected to have it to the end."""
        extra = list(extra)
        blocks = {s.shared_blocks for s in extra if s.shared_blocks}
        shared = sum(self.footprint.of_blocks(some.tokens) for some in blocks)
        claims = sum(self.footprint.tokens(self._first_claim(s), s.shared) for s in extra) + shared
        return self._claimed.tokens[rank] + claims <= self._room[rank] and super().fits(rank, extra)

    def may_enter(self, sequence: SequenceState) -> bool:
        """Return whether no older sequence waits, whatever its lane."""
        return not self._waiting or min(s.seniority for s in self._waiting) >= sequence.seniority

    def add(self, sequence: SequenceState) -> None:
        """Count a sequence on its R-rank; it has its `start_step`."""
        super().add(sequence)
        self._waiting.discard(sequence)
        self._grow_later(self._claims[sequence.rank][sequence])

    def grow(self, lane: int, now: int) -> None:
        """Claim room for the step after `now` of a lane's sequences; have others leave if there is none."""
        self._now, due = now, self._growth[lane]
        while due and due[0][0] <= now:
            _, entry, claim = heapq.heappop(due)
            if not claim.live or entry != claim.due:
                continue
            if isinstance(claim.holder, SequenceState) and claim.holder.returning:  # it does not decode yet
                self._grow_at(lane, now + 1, claim)
                continue
            before, claim.tokens = claim.own, claim.tokens + self.block_tokens
            claim.own = self.footprint.tokens(claim.tokens, claim.holder.shared)
            for tally in (self._claimed, *(() if claim.leaves else (self._staying,))):
                tally.add(claim.rank, claim.own - before, None)
            self._grow_later(claim)
        for rank, room in enumerate(self._room):
            while self._staying.tokens[rank] > room:
                self._have_leave(rank)

    def leaving(self, lane: int) -> list[SequenceState]:
        """Return the sequences of a lane that must give up their room with its next plan."""
        leaving, self._leaving[lane] = self._leaving[lane], []
        return [s for s in leaving if s.finish_reason is None]

    def has_leaving(self, lane: int) -> bool:
        """Return whether sequences of a lane must give up their room with its next plan."""
        return any(s.finish_reason is None for s in self._leaving[lane])

    def may_start(self, sequences: Sequence[SequenceState], step: int) -> bool:
        """Return True: what sequences hold is claimed step by step, whenever they start."""
        return True

    def try_ahead(self, rank: int, sequences: Sequence[SequenceState], tokens: Sequence[int]) -> bool:
        """Let sequences be ahead if what they claim then has room; have none leave for it."""
        claims, lacking = [self._claims[rank][sequence] for sequence in sequences], 0
        for sequence, claim, more in zip(sequences, claims, tokens, strict=True):
            most = min(sequence.length + 2 + more, sequence.final_length)  # behind the next step
            needed = self.footprint.rounded(most)
            lacking += max(self.footprint.tokens(needed, sequence.shared) - claim.own, 0)
        if self._claimed.tokens[rank] + lacking > self._room[rank]:
            return False
        for sequence, claim, more in zip(sequences, claims, tokens, strict=True):
            sequence.draft.ahead = more
            self._grow_later(claim)
        self.grow(sequences[0].lane, self._now)
        return True

    def await_room(self, sequences: Sequence[SequenceState]) -> None:
        """Take note that sequences have left, and wait to enter again."""
        self._waiting.update(sequences)

    def ended(self, sequence: SequenceState) -> None:
        """Count the length of a finished sequence; its lane's next plan frees its room."""
        self._leave(self._claims[sequence.rank][sequence])
        if sequence.beams is None:
            self.lengths.add(len(sequence.generated), stopped=sequence.finish_reason == "stop")
            self._changed = True

    def check(self) -> None:
        """Raise InvariantViolation if what is claimed does not fit, or was counted wrong."""
        for rank, claims in enumerate(self._claims):
            counted, staying = self._tally(), self._tally()
            for claim in claims.values():
                for tally in (counted, *(() if claim.leaves else (staying,))):
                    tally.add(rank, claim.own, claim.holder.shared_blocks)
            found = counted.tokens[rank], staying.tokens[rank]
            if found != (self._claimed.tokens[rank], self._staying.tokens[rank]):
                held = self._claimed.tokens[rank], self._staying.tokens[rank]
                raise InvariantViolation("claims are counted as they change", f"R-rank {rank}: {held}, found {found}")
            if found[1] > self._room[rank]:
                raise InvariantViolation(
                    "claims for the next step fit", f"R-rank {rank}: {found[1]} tokens of {self._room[rank]}"
                )

    def _tally(self) -> Tally:
        return Tally(len(self.capacity), self.footprint)

    def _hold(self, rank: int, holder: KvHolder) -> None:
        super()._hold(rank, holder)
        tokens = self._first_claim(holder)
        claim = Claim(holder, rank, tokens, self.footprint.tokens(tokens, holder.shared))
        self._claims[rank][holder] = claim
        for tally in (self._claimed, self._staying):
            tally.add(rank, claim.own, holder.shared_blocks)

    def _drop(self, rank: int, holder: KvHolder) -> None:
        super()._drop(rank, holder)
        claim = self._claims[rank].pop(holder)
        claim.live = False
        for tally in (self._claimed, *(() if claim.leaves else (self._staying,))):
            tally.remove(rank, claim.own, holder.shared_blocks)

    def _leave(self, claim: Claim) -> None:
        """Count a claim no longer for the steps after its lane's next plan."""
        if not claim.leaves:
            claim.leaves = True
            self._staying.remove(claim.rank, claim.own, claim.holder.shared_blocks)

    def _have_leave(self, rank: int) -> None:
        """Choose the youngest sequence of an R-rank to leave, with all that are prefilled with it."""
        free = [s for s, claim in self._claims[rank].items() if isinstance(s, SequenceState) and not claim.leaves]
        youngest = max((s for s in free if may_leave(s)), key=lambda s: s.seniority, default=None)
        if youngest is None:
            raise InvariantViolation(
                "what is reserved fits", f"R-rank {rank}: {self._staying.tokens[rank]} tokens of {self._room[rank]}"
            )
        together = [youngest]
        if not youngest.generated:
            together = [s for s in free if s.request is youngest.request and not s.generated]
        for sequence in together:
            self._leave(self._claims[rank][sequence])
            self._leaving[sequence.lane].append(sequence)

    def _first_claim(self, holder: KvHolder) -> int:
        """Return the tokens, in whole blocks, for which a sequence or prefix claims room until it has decoded."""
        tokens = holder.final_length if reserves(holder) else min(holder.prompt_length + 1, holder.final_length)
        return self.footprint.rounded(tokens)

    def _grow_later(self, claim: Claim) -> None:
        """Note the step whose plan claims one more block for a sequence, if it may ever need one."""
        sequence = claim.holder
        assert isinstance(sequence, SequenceState), "a prefix does not grow"
        if claim.tokens < sequence.final_length:
            step = sequence.start_step + claim.tokens - sequence.prompt_length - 1 - sequence.ahead
            self._grow_at(sequence.lane, step, claim)

    def _grow_at(self, lane: int, step: int, claim: Claim) -> None:
        """Let a claim grow with the plan of a step of its lane, and at no other step."""
        claim.due = next(self._ties)
        heapq.heappush(self._growth[lane], (step, claim.due, claim))

    def _peak(self, holders: list[KvHolder]) -> int:
        """Return the most group tokens that they are expected to take at any step, with a margin."""
        self._estimate()
        if not self.lengths.stops:
            return super()._peak(holders)
        prompt, final, end = self._courses(holders)[:, :, None]
        facts = [
            (s.start_step, self._generated(s), reserves(s)) if isinstance(s, SequenceState) else _HELD for s in holders
        ]
        start, generated, reserving = np.array(facts).T[:, :, None]
        at = self._steps_ahead(end)
        held = np.where(reserving, final, np.maximum(prompt, final - np.maximum(end - at, 0)))
        shared = np.array([s.shared for s in holders])[:, None]
        tokens = self.footprint.tokens(held, shared)
        chance = self.lengths.going(generated, generated + np.maximum(at - np.maximum(start, self._now), 0))
        chance = np.where(reserving, 1.0, chance) * (end + 1 >= at)
        load = (chance * tokens).sum(axis=0)
        margin = MARGIN * np.sqrt((chance * (1 - chance) * tokens**2).sum(axis=0))
        for blocks, last in _last_steps(holders, end[:, 0].tolist()).items():
            load += np.where(last + 1 >= at, self.footprint.of_blocks(blocks.tokens), 0)
        return int((load + margin).max())

    def _steps_ahead(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return steps at which a peak is looked for: some of the steps after `ends`, and more of the next ones."""
        at = np.unique(ends + 1)
        return np.union1d(at[:: -(-len(at) // _LOOKS)], self._now + _AHEAD)

    def _generated(self, sequence: SequenceState) -> int:
        """Return how many tokens a sequence has at the beginning of the step under way."""
        return sequence.resumed + max(self._now - sequence.start_step + 1, 0)

    def _estimate(self) -> None:
        """Estimate lengths anew if much has changed."""
        if not self._changed and (not self.lengths.stops or self._now < self._estimated + _STALE):
            return
        self._changed, self._estimated = False, self._now
        sequences = {s for claims in self._claims for s in claims if isinstance(s, SequenceState)} | self._waiting
        self.lengths.estimate(
            [s.resumed if s.rank < 0 else self._generated(s) for s in sequences if s.finish_reason is None]
        )


def reserves(holder: KvHolder) -> bool:
    """Return whether a holder has the room from the start that it may take in the end."""
    return not isinstance(holder, SequenceState) or holder.beams is not None or holder.preemptions >= MOST_PREEMPTIONS


def may_leave(sequence: SequenceState) -> bool:
    """Return whether a sequence may be chosen to leave; what is brought back from a tier comes first."""
    return not reserves(sequence) and not sequence.returning


def placement_kind(admission: str) -> type[Placement]:
    """Return what places sequences, by a name in `config.ADMISSIONS`."""
    return OptimisticPlacement if admission == "optimistic" else Placement
