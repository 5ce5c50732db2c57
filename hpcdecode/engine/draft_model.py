"""A second, faster model on an S-rank, which guesses the tokens that follow a sequence (speculative decoding).

It may be a layer for multi-token prediction, which reads a token with the hidden state that the first model has of the
token before; behind its own guesses, with what it has of them itself. So it reads from where there are such states.

It keeps K and V of the sequences that it guesses for in a KV cache of its own, where it has room for them. No result
depends on it: a sequence without room, or that it has not read yet, has no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.cpu_step import fusable
from hpcdecode.engine.followed import FollowedSequence, FollowedSequences
from hpcdecode.engine.model_inputs import StepTokens
from hpcdecode.engine.unread_states import UnreadStates
from hpcdecode.exchange.base import joined
from hpcdecode.model import SplitModel
from hpcdecode.model.run.bound_slice import alone
from hpcdecode.model.run.fused_step import FusedStep
from hpcdecode.model.run.head_input import LmHeadInput
from hpcdecode.model.run.recorded_slices import RecordedSlices
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.sampling.sampler import foresee
from hpcdecode.schedule.model_drafts import FEW, AskedDraft, DraftSeconds
from hpcdecode.system.timeline import Timeline
from hpcdecode.system.uploads import upload

_READ_AT_ONCE = 512  # tokens in a step, of all sequences that have more than FEW to read


@dataclass(slots=True)
class ReadTokens:
    """Tokens that the model reads next, behind those of a sequence that the KV cache holds.

    Attributes:
        held: What it holds.
        ids: The tokens.
        sure: How many of them are the sequence's; the others are guessed, or forced by a grammar.
        hidden: Hidden states of the tokens before them, [n, hidden], if the model takes some.
    """

    held: FollowedSequence
    ids: list[int]
    sure: int = 0
    hidden: Tensor | None = None

    def take(self, count: int) -> ReadTokens:
        """Return the first tokens, and keep the others."""
        first = ReadTokens(self.held, self.ids[:count], min(self.sure, count))
        self.ids, self.sure = self.ids[count:], self.sure - first.sure
        if self.hidden is not None:
            first.hidden, self.hidden = self.hidden[:count], self.hidden[count:]
        return first


class DraftModel:
    """Goes on with sequences.

    Args:
        model: The second model, whole, or a layer for multi-token prediction of the first.
        kv_cache: Of its own, on its device, without windows.
        slots: Of the KV cache.
        vocabulary: Token ids of the first model are below.
        timeline: Of this rank.
        most: Tokens of a sequence that the model sees; of longer ones the last half as many, and what follows.

    Attributes:
        model: The same.
        kv_cache: The same.
        followed: The sequences that it has read.
        states: What it reads tokens with, if it takes hidden states.
    """

    def __init__(
        self, model: SplitModel, kv_cache: KvCache, slots: int, vocabulary: int, timeline: Timeline, most: int
    ):
        self.model, self.kv_cache, self._vocabulary, self._timeline = model, kv_cache, vocabulary, timeline
        self.states = None if model.split.trace.hidden is None else UnreadStates()
        most = min(most, model.max_positions or most)
        self.followed = FollowedSequences(kv_cache, slots, most, keeps_guesses=self.states is None)
        self._fused = FusedStep.of(model, kv_cache) if fusable(kv_cache) else None
        self._recorded = RecordedSlices.of(model)
        self._passes: list[tuple[int, float]] = []
        self._reading, self._tokens_read = 0.0, 0

    def continued(self, asked: Sequence[AskedDraft]) -> list[list[int]]:
        """Return a draft of each sequence of a lane, or no tokens, as `Continuation.continued`."""
        if not asked:
            return []
        lane = asked[0].sequence.lane
        self._timeline.enter("draft", lane)
        drafts = self._drafts(asked)
        self._timeline.enter("plan", lane)
        return drafts

    def _drafts(self, asked: Sequence[AskedDraft]) -> list[list[int]]:
        """Return a draft of each sequence, or no tokens."""
        self.followed.begin_call()
        drafts: list[list[int]] = [[] for _ in asked]
        reads = {i: read for i, one in enumerate(asked) if (read := self._read(one)) is not None}
        self._catch_up(reads)
        for i in list(reads) if self.states is None else ():
            drafts[i] += asked[i].forced
            if len(drafts[i]) >= asked[i].tokens:
                del reads[i]
        while reads:
            begin, own = perf_counter(), [asked[i].sequence for i in reads]
            head = self._run(list(reads.values()))
            tokens = self._tokens(head, own, [len(drafts[i]) for i in reads])
            self._passes.append((len(reads), perf_counter() - begin))
            for row, (i, token) in enumerate(zip(list(reads), tokens, strict=True)):
                token = next(iter(asked[i].forced[len(drafts[i]) :]), token)
                hidden = None if self.states is None else head.hidden[row : row + 1]
                reads[i] = ReadTokens(reads[i].held, [token], hidden=hidden)
                taken = self._takes(asked[i].sequence, [*drafts[i], token])
                drafts[i] += [token] * taken
                if not taken or len(drafts[i]) == asked[i].tokens:
                    del reads[i]
        return drafts

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is held of a sequence, as `Continuation.forget`."""
        self.followed.forget(sequence)
        if self.states is not None:
            self.states.forget(sequence)

    def forget_all(self) -> None:
        """Drop what is held of all sequences, as of a run that was cut off."""
        self.followed.forget_all()
        if self.states is not None:
            self.states.forget_all()

    def take_hidden(self, sequence: SequenceState, rows: Tensor, end: int) -> None:
        """Take hidden states, as `Continuation.take_hidden`."""
        if self.states is not None:
            self.states.take(sequence, rows, end)

    def unread(self, sequence: SequenceState) -> int | None:
        """Return how many tokens are to be read of a sequence, as `Continuation.unread`."""
        first = self._first(sequence)
        if first is None:
            return None
        return len(sequence.given_ids) + len(sequence.generated) - self.followed.known(sequence, first)

    def take_seconds(self) -> DraftSeconds:
        """Return what drafts took, as `Continuation.take_seconds`."""
        spent = DraftSeconds(self._passes, self._tokens_read, self._reading)
        self._passes, self._tokens_read, self._reading = [], 0, 0.0
        return spent

    def _first(self, sequence: SequenceState) -> int | None:
        """Return the place of the first token of a sequence that can be read, or None if none can."""
        return 0 if self.states is None else self.states.first(sequence)

    def _takes(self, sequence: SequenceState, draft: list[int]) -> bool:
        """Return whether the first model can take the last token of a draft, by its vocabulary and by a grammar."""
        grammar = sequence.sampler.matcher
        return draft[-1] < self._vocabulary and (grammar is None or grammar.allowed(draft) == len(draft))

    def _read(self, asked: AskedDraft) -> ReadTokens | None:
        """Return what the model has to read before it can go on with a sequence; None if it cannot."""
        given, generated, first = asked.sequence.given_ids, asked.sequence.generated, self._first(asked.sequence)
        held = None if first is None else self.followed.follow(asked.sequence, asked.tokens, first)
        if held is None:
            return None
        ids = [*given[held.known :], *generated[max(held.known - len(given), 0) :]]
        sure = len(ids)
        if self.states is not None:
            return ReadTokens(held, ids, sure, self.states.since(asked.sequence, held.known))
        ids += asked.forced
        if self.model.vocab_size < self._vocabulary and max(ids) >= self.model.vocab_size:
            return None
        return ReadTokens(held, ids, sure)

    def _catch_up(self, reads: dict[int, ReadTokens]) -> None:
        """Read what sequences had before they had drafts, some of it in a step; leave out those that have more."""
        left, now = _READ_AT_ONCE, []
        for i, read in list(reads.items()):
            if len(read.ids) <= FEW:
                continue
            count = min(len(read.ids) - 1, left)
            left -= count
            if count:
                now.append(read.take(count))
            if len(read.ids) > 1:
                del reads[i]
        if not now:
            return
        begin = perf_counter()
        self._run(now)
        self._reading += perf_counter() - begin
        self._tokens_read += sum(len(read.ids) for read in now)

    def _run(self, reads: Sequence[ReadTokens]) -> LmHeadInput:
        """Run the model over the next tokens of sequences; return where its last slice ends for the last of each."""
        slots = np.array([read.held.slot for read in reads], np.int32)
        counts = np.array([len(read.ids) for read in reads], np.int32)
        starts = [read.held.known - read.held.skipped + len(read.held.guessed) for read in reads]
        ids = np.array([token for read in reads for token in read.ids], np.int64)
        positions = np.concatenate([np.arange(s, s + len(r.ids)) for s, r in zip(starts, reads, strict=True)])
        last = np.cumsum(counts, dtype=np.int64) - 1
        self.kv_cache.extend(slots, counts)
        context = StepTokens(*upload(self.model.device, ids, positions, last)).context
        hidden = [read.hidden for read in reads if read.hidden is not None]
        if hidden:
            context = (*context, hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        if self._fused and self._fused.suits(positions[last].tolist(), len(ids)):
            rows, context = self.model.slice(0, None, context)
            o, context, _ = self._fused.run(slots, counts, joined(*rows), context)
        else:
            o, context = self._by_layers(slots, counts, context)
        for read in reads:
            read.held.known += read.sure
            read.held.guessed += read.ids[read.sure :]
        return alone(self.model.start_last(o, context))

    def _by_layers(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], context: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output of the last attention, and the context, given that of the first slice."""
        o, count = None, len(context[0])
        lane = self._recorded.lane(0) if self._recorded and self._recorded.suits(count) else None
        if lane is not None:
            lane.begin(context)
        for layer in self.model.layers:
            rows, context = self.model.slice(layer, o, context) if lane is None else lane.slice(layer)
            o = self.model.empty_output(layer, count) if lane is None else lane.output(layer)
            self.kv_cache.attend(layer, slots, counts, joined(*rows), o, self.model.sinks(layer))
        assert o is not None, "expected a model with attention layers"
        return o, context

    def _tokens(self, head: LmHeadInput, sequences: Sequence[SequenceState], ahead: Sequence[int]) -> list[int]:
        """Return a guess of each sequence at the token behind the next ones, `ahead` of them."""
        if all(s.prompt.params.temperature == 0 for s in sequences):
            found = head.largest()
            if found is not None:
                largest: list[int] = found.ids.tolist()
                return largest
        return foresee(head.logits(), sequences, ahead)
