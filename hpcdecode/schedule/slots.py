"""The slots of a lane: who holds which, and what the R-ranks are to do about it in the lane's next plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcdecode.errors import InvariantViolation
from hpcdecode.requests.prefix import KvHolder
from hpcdecode.requests.sequence import Request, SequenceState


class Slots:
    """The same slots on every R-rank. A slot is free, or held by one sequence or prefix, until that gives it back.

    A slot that is held is open on the R-rank once tokens of its holder were sent there, or it was forked.

    Args:
        count: of slots.
    """

    def __init__(self, count: int):
        self.count = count
        self._forks: list[tuple[int, int, int]] = []
        self._released: list[tuple[int, int]] = []
        self._free = list(range(count))[::-1]

    def __len__(self) -> int:
        """Return the number of free slots."""
        return len(self._free)

    def take(self, holder: KvHolder) -> None:
        """Give a free slot to `holder`."""
        holder.slot = self._free.pop()

    def hold(self, holder: KvHolder) -> None:
        """Count the slot that `holder` names as its own."""
        self._free.remove(holder.slot)

    def give_back(self, holder: KvHolder) -> None:
        """Take the slot of `holder`; the R-ranks have released it, or never opened it."""
        self._free.append(holder.slot)
        holder.slot = -1

    def fork_from(self, leader: SequenceState) -> list[SequenceState]:
        """Part a prefilled sequence and its forks; return those that go on, with a copy of its K and V each.

        The first that goes on takes over the leader's slot. Slots of forks that are finished already go back.
        """
        going = [s for s in leader.with_forks if s.finish_reason is None]
        heir = going[0] if going else leader
        heir.slot, leader.slot = leader.slot, heir.slot
        for sequence in leader.with_forks:
            sequence.prefilled = leader.prefilled
            if sequence is heir:
                continue
            if sequence.finish_reason is None:
                self._forks.append((leader.rank, heir.slot, sequence.slot))
            else:
                self.give_back(sequence)
        return going

    def leave(self, sequence: SequenceState) -> bool:
        """Take the slot of a sequence that gives up its K and V; return whether the R-rank has it open in that slot.

        Forks from it that are to come are made from the slot of the first of them, which takes over its own.
        """
        for at, (_, source, new) in enumerate(self._forks):
            if new == sequence.slot:
                del self._forks[at]
                self.give_back(sequence)
                return False
            if source == sequence.slot:
                del self._forks[at]
                heir = next(s for s in sequence.request.sequences if s.slot == new)
                heir.slot, sequence.slot = sequence.slot, heir.slot
                self.give_back(sequence)
                return False
        return True

    def follow(self, request: Request, parents: Sequence[int]) -> None:
        """Let each beam of a request go on from the K and V of its parent, given by index.

        The first child of a beam takes over its slot; others fork into slots of beams without children.

        Raises:
            InvariantViolation: the beams do not hold the slots that they held before.
        """
        beams = request.sequences
        slots = [s.slot for s in beams]
        unused = [slots[beam] for beam in range(len(beams)) if beam not in parents]
        self._released += [(beams[0].rank, slot) for slot in unused]
        for place, (sequence, parent) in enumerate(zip(beams, parents, strict=True)):
            if parent in parents[:place]:
                sequence.slot = unused.pop()
                self._forks.append((sequence.rank, slots[parent], sequence.slot))
            else:
                sequence.slot = slots[parent]
        if sorted(s.slot for s in beams) != sorted(slots):
            raise InvariantViolation("beams hand over the slots that they hold", f"{slots} became otherwise")

    def take_forks(self) -> list[tuple[int, int, int]]:
        """Return (R-rank, slot, new slot) of the forks since the last call, for the next plan."""
        forks, self._forks = self._forks, []
        return forks

    def take_released(self) -> list[tuple[int, int]]:
        """Return (R-rank, slot) of slots to release in the next plan that are held on, for forks to come."""
        released, self._released = self._released, []
        return released

    def check(self, holders: Iterable[KvHolder]) -> None:
        """Raise InvariantViolation unless every slot is free or held by one of `holders`."""
        held = [h.slot for h in holders if h.slot >= 0]
        if sorted(held + self._free) != list(range(self.count)):
            raise InvariantViolation("a slot is free or has one holder", f"{sorted(held)} held, {len(self)} free")
