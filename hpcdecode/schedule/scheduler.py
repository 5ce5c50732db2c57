"""The state of a lane from step to step: what it admits, prefills, decodes and frees becomes a plan a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from hpcdecode.requests.prefix import KvHolder, Prefix
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.admission import Admission, Feed
from hpcdecode.schedule.apart import PromptsApart
from hpcdecode.schedule.beam_step import update_beams
from hpcdecode.schedule.chunks import decode_places, forked_prefixes, next_chunks, places_of, tokens_first
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan, Table, table_of
from hpcdecode.schedule.prefixes import note_shared
from hpcdecode.schedule.slots import Slots
from hpcdecode.schedule.speculation import Speculation
from hpcdecode.schedule.step import Chunk, Step
from hpcdecode.schedule.swaps import Swaps
from hpcdecode.schedule.tier_traffic import TierTraffic


class Scheduler:
    """Admits requests to one lane and turns its state into a plan a step.

    Args:
        lane: index of the lane.
        feed: of all lanes of the S-rank.
        placement: of the S-rank.
        limits: of the lane.
        stops: what ends a sequence.
        swaps: tiers of the R-ranks, of the S-rank; None if there are none.
        speculation: what drafts tokens, of the S-rank; None for nothing.

    Attributes:
        requests: in flight, by the line of their row.
        prefilling: sequences, from which others may fork, and before them the prefixes that they wait for.
        ready: prefilled, waiting for their micro-batch to start.
        tiers: what has moved to tiers, and is brought back.
        decoding: the sequences that are decoded in every step.
        load: tokens that the sequences of the last plan attend to.
        slots: of the lane.
        apart: prompts that other ranks prefill, if they do; None if they are in the lane's steps.
        shared_tokens: of prompts, not prefilled because they lie in prefixes.
        preemptions: how often a sequence gave up its room.
        preempted_tokens: whose K and V were dropped so, and are computed again.
    """

    def __init__(
        self,
        lane: int,
        feed: Feed,
        placement: Placement,
        limits: LaneLimits,
        stops: Stops,
        swaps: Swaps | None = None,
        speculation: Speculation | None = None,
    ):
        self.lane, self.placement, self.limits, self.stops = lane, placement, limits, stops
        self.speculation = speculation or Speculation(None, placement)
        self.admission = Admission(lane, feed, placement, limits, stops)
        self.prefixes = self.admission.prefixes
        self.requests: dict[int, Request] = {}
        self.prefilling: deque[SequenceState | Prefix] = deque()
        self.ready: list[SequenceState] = []
        self.tiers = TierTraffic(placement, swaps)
        self.decoding: list[SequenceState] = []
        self.load = self.shared_tokens = self.preemptions = self.preempted_tokens = 0
        self.slots = Slots(limits.slots)
        self.apart = PromptsApart(lane, placement) if limits.apart else None
        self._freed: list[SequenceState] = []  # finished, to be released by the next plan
        self._dropped: list[Prefix] = []  # the same of prefixes
        self._forgotten: list[int] = []  # keys of prefixes, and of prompts in prefill, that plans have released
        self._start_step = self._prefix_step = 0  # of the micro-batch that is being prefilled
        self._shrunk = False  # whether it has lost sequences, so that its prompts may be done before it starts

    @property
    def active(self) -> int:
        """Return the number of sequences in flight."""
        decoded = len(self.decoding) + len(self.ready) + len(self.tiers.returning)
        return decoded + sum(len(s.with_forks) for s in self.prefilling)

    @property
    def tokens_in_flight(self) -> int:
        """Return the tokens that KV caches keep of the sequences in flight."""
        decoded, kept = (*self.decoding, *self.ready, *self.tiers.returning.values()), self.placement.footprint.kept
        return round(sum(kept(s.length) for s in decoded) + sum(kept(s.prefilled) for s in self.prefilling))

    def exhausted(self) -> bool:
        """Return whether no sequence is in flight and nothing is left to admit."""
        return not self.active and self.admission.exhausted()

    def all_prefilled(self) -> bool:
        """Return whether no prompt token is left to compute, of requests in flight and of those to come."""
        return not self.prefilling and self.admission.exhausted()

    def next_step(self, now: int) -> Step:
        """Return the plan of lane step `now`; it runs no model if there is nothing to do but to wait for room."""
        unconfirmed = self.speculation.take_unconfirmed(self.lane)
        release = self._release(self._settle_tiers(now))
        if self._shrunk and not self.prefilling:
            self._shrunk = False
            self.placement.start([s for s in self.ready if s.start_step > now], now)
        if self.apart is not None:
            at_once = self.admission.policy.period == 1 or not self.decoding
            self.apart.settle(self.prefilling, self.ready, now, at_once)
        started = [s for s in self.ready if s.start_step <= now]
        self.decoding += started
        self.ready = [s for s in self.ready if s.start_step > now]
        self.placement.grow(self.lane, now)
        if not self.prefilling:
            self._admit(now)
        self.load = sum(s.length + 1 for s in self.decoding)
        chunks = [] if self.apart is not None else self._chunks(now)
        if not chunks:  # beside prompts no row is free
            self.speculation.draft(self.decoding)
        swap_out, swap_in = self.tiers.take_rows()
        decode = table_of(decode_places(self.decoding), 2)
        plan = Plan(
            truncate=table_of(unconfirmed, 3),
            swap_out=swap_out,
            release=release,
            fork=table_of(self.slots.take_forks() + forked_prefixes(chunks), 3),
            swap_in=swap_in,
            decode=decode,
            prefill=table_of(places_of(chunks, len(decode)), 4),
        )
        return Step(plan, list(self.decoding), chunks)

    def next_prompts(self) -> Step | None:
        """Return a step of prompts for other ranks; None if there are none, or some are under way.

        Its plan comes after that of the last step, and its `update` when it is done.
        """
        if self.apart is None or self.apart.under_way or not self.prefilling:
            return None
        self.apart.under_way = True
        chunks = next_chunks(self.prefilling, self.limits.prefill_tokens)
        fork, prefill = table_of(forked_prefixes(chunks), 3), table_of(places_of(chunks, 0), 4)
        return Step(Plan(fork=fork, prefill=prefill, apart=True), [], chunks)

    def must_wait(self, now: int) -> bool:
        """Return whether step `now` may not begin before the prompts that other ranks prefill are done."""
        return self.apart is not None and self.apart.must_wait(self.prefilling, now)

    def stop_plan(self) -> Plan:
        """Return the lane's last plan: it frees what has finished, for the lanes that go on."""
        self._dropped += self.prefixes.drop_unused()
        self.placement.lacking.discard(self.lane)
        self.load = 0
        release = self._release()
        self.placement.check()
        self.tiers.check()
        if not self.requests:
            self.slots.check(())
        return Plan(release=release, stop=True)

    def take_forgotten(self) -> list[int]:
        """Return the keys of prefixes and prompts that plans have released since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def update(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """Take the sampled token of each sequence in `step.sampled`; return the requests that are finished."""
        for request in {id(s.request): s.request for s in step.sampled if s.beams}.values():
            update_beams(request, self.slots)
        finished = self._accept(step.sampled, tokens)
        if step.prefill and self.apart is not None:
            self.apart.under_way = False
        for chunk in step.prefill:
            chunk.sequence.prefilled += chunk.count
            if chunk.completes:
                self.prefilling.popleft()
                if isinstance(chunk.sequence, SequenceState):
                    self.ready += self.slots.fork_from(chunk.sequence)
        return self._settle(len(tokens), finished)

    def confirm(self, sequences: Sequence[SequenceState], tokens: Sequence[int]) -> list[Request]:
        """Take one more token of each of some sequences that the step before has given tokens, as `update` does."""
        return self._settle(len(tokens), self._accept(sequences, tokens))

    def _settle(self, tokens: int, finished: Sequence[SequenceState]) -> list[Request]:
        """Let sequences that are finished decode no more; return the requests that are."""
        self.admission.policy.observe(tokens, sum(s.finish_reason == "stop" for s in finished))
        if not finished:
            return []
        self.decoding = [s for s in self.decoding if s.finish_reason is None]
        self._freed += finished
        lines = dict.fromkeys(s.prompt.line for s in finished)
        return [self.requests.pop(line) for line in lines if self.requests[line].finished]

    def _accept(self, sequences: Sequence[SequenceState], tokens: Sequence[int]) -> list[SequenceState]:
        """Give each sequence its token, but for beams, which have theirs; return those that are finished."""
        finished = []
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.beams is None:
                sequence.accept(token, self.stops)
            if sequence.finish_reason is not None:
                finished.append(sequence)
                self.placement.ended(sequence)
                if sequence.prefix:
                    sequence.prefix.users -= 1
        return finished

    def _release(self, lost: Sequence[tuple[int, int]] = ()) -> Table:
        """Return the slots to free: `lost` ones, and those of sequences and prefixes that have left or ended."""
        preempted = [*lost, *self._preempt()]
        freed, self._freed = self._freed, []
        dropped, self._dropped = self._dropped, []
        for sequence in freed:
            self.placement.remove(sequence)
        for prefix in dropped:
            self.placement.drop(prefix)
        self._forgotten += [prefix.key for prefix in dropped]
        opened = [s for s in freed if s.slot >= 0]
        places = [(s.rank, s.slot) for s in opened] + [(rank, p.slot) for p in dropped for rank in p.ranks]
        holders: list[KvHolder] = [*opened, *dropped]
        for holder in holders:
            self.slots.give_back(holder)
        return table_of(places + preempted + self.slots.take_released(), 2)

    def _preempt(self) -> list[tuple[int, int]]:
        """Let sequences give up their room that must, and wait for it again; return R-ranks and slots to release."""
        leaving = self.placement.leaving(self.lane)
        if not leaving:
            return []
        opened, swaps = [], {}
        for sequence in leaving:
            begun = sequence.prefilled > (sequence.prefix.prompt_length if sequence.prefix else 0)
            dropped = sequence.length if begun else 0
            if sequence in self.prefilling:
                self._forgotten.append(sequence.key)
            elif sequence.generated:
                begun = self.slots.leave(sequence)
            if begun:
                opened.append((sequence.rank, sequence.slot))
                if swap := self.tiers.move_out(sequence):
                    swaps[sequence], dropped = swap, 0
            self.preempted_tokens += dropped
            if sequence.slot >= 0:
                self.slots.give_back(sequence)
            self.placement.remove(sequence)
            if sequence.prefix:
                sequence.prefix.users -= 1
        self.preemptions += len(leaving)
        self.placement.lacking.add(self.lane)
        units = [s for s in leaving if s in self.prefilling or s.generated]
        self.decoding, self.ready = ([s for s in of if s not in leaving] for of in (self.decoding, self.ready))
        staying = deque(s for s in self.prefilling if s not in leaving)
        self._shrunk |= len(staying) < len(self.prefilling)
        self.prefilling = staying
        for unit in units:
            unit.give_up_room(swaps.get(unit))
        self.admission.put_back(units)
        return opened

    def _settle_tiers(self, now: int) -> list[tuple[int, int]]:
        """Go on with sequences that are back; have others be prefilled again, and return their R-ranks and slots."""
        back, lost = self.tiers.settle()
        for sequence in back:
            self.placement.start([sequence], max(now, sequence.start_step))
        self.ready += back
        places = [(s.rank, s.slot) for s in lost]
        for sequence in lost:
            self.preempted_tokens += sequence.length
            self.slots.give_back(sequence)
            self.placement.remove(sequence)
            sequence.start_over()
        if lost:
            self.admission.put_back(lost)
        return places

    def _admit(self, now: int) -> None:
        in_flight = [*self.decoding, *self.ready, *self.tiers.returning.values()]
        group = self.admission.admit(now, in_flight, self.slots)
        for sequence in group.sequences:
            self.requests[sequence.prompt.line] = sequence.request
        fresh = self.tiers.bring_back(group.sequences)
        self.prefilling.extend((*group.prefixes, *fresh))
        self.shared_tokens += note_shared(fresh, group.prefixes)
        self._start_step, self._prefix_step = group.start_step, group.prefix_step
        self._dropped += group.dropped
        if self.limits.keeps_prefixes and group.lacks_room and not group.sequences:
            self.admission.policy.deferred(now)

    def _chunks(self, now: int) -> list[Chunk]:
        """Return an even share of the prompt tokens that are left to prefill before the micro-batch starts."""
        if not self.prefilling:
            return []
        end = self._prefix_step if isinstance(self.prefilling[0], Prefix) else self._start_step
        return next_chunks(self.prefilling, ceil(tokens_first(self.prefilling) / max(end - now, 1)))
