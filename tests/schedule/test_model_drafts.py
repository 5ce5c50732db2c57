"""Whether a second model is worth asking: by what it takes, what rows take, and how often it is right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.schedule.draft_chances import DraftChances
from hpcdecode.schedule.model_drafts import AskedDraft, DraftSeconds, ModelDrafts


def test_chances_are_means_by_places():
    chances = DraftChances()
    assert chances.of(0) == chances.of(20) == 0.8 and not chances.drafts
    for _ in range(300):
        chances.learn(4, 2)
    assert chances.of(1) > 0.99 and chances.of(2) < 0.01 and chances.of(3) == 0.8 and chances.drafts == 300


class Machine:
    """An S-rank whose steps, passes and reading take what they are said to take, and a model that is often right.

    Args:
        step: Seconds of a step without rows.
        row: Of each of its rows.
        passing: Of a pass of the second model.
        reading: Of a token that it reads.
        right: Tokens of each draft that are right, if it has so many.
        unread: Tokens that it has to read of every sequence at first.
    """

    def __init__(self, *, sequences=4, step=0.01, row=0.0001, passing=0.002, reading=1e-5, right=4, unread=0, most=500):
        self.step, self.row, self.passing, self.reading, self.right = step, row, passing, reading, right
        self.drafts = ModelDrafts(self, 16)
        self.sequences = [self._sequence(line, most) for line in range(sequences)]
        self.left = {s.key: unread for s in self.sequences}
        self.passes, self.read = [], 0
        self.chosen = []

    def _sequence(self, line, most):
        request = Request(Prompt(line, str(line), [1, 2], SamplingParams(max_tokens=most)), most, 0)
        return SequenceState(request, rank=0, slot=0, prefilled=2, generated=[3])

    def unread(self, sequence):
        return 1 + self.left[sequence.key]

    def take_seconds(self):
        spent = DraftSeconds(self.passes, self.read, self.read * self.reading)
        self.passes, self.read = [], 0
        return spent

    def run(self, steps):
        """Run steps; return how many tokens were drafted of how many sequences in the last one."""
        for _ in range(steps):
            count = len(self.sequences)
            self.chosen = chosen = self.drafts.choose(self.sequences, count, 256)
            ready = [(s, n) for s, n in chosen if not self.left[s.key]]
            for sequence, _ in chosen:
                self.read += min(self.left[sequence.key], 512)
                self.left[sequence.key] -= min(self.left[sequence.key], 512)
            for sequence, tokens in ready:
                self.drafts.note(AskedDraft(sequence, tokens, []), tokens)
            self.passes = [(len(ready), self.passing)] * max((n for _, n in ready), default=0)
            rows = count + sum(n for _, n in ready)
            seconds = self.step + rows * self.row + len(self.passes) * self.passing + self.read * self.reading
            self.drafts.observe(seconds, rows, count + sum(min(n, self.right) for _, n in ready))
            for sequence in self.sequences:
                self.drafts.settle(sequence, self.right)
        return len(self.chosen), self.chosen[0][1] if self.chosen else 0


def test_a_fast_model_that_is_right_guesses_for_all():
    """As many tokens as are right: one more would be a row and a pass for nothing."""
    assert Machine().run(150) == (4, 4)
    count, tokens = Machine(sequences=100, right=16, passing=1e-4, row=1e-6).run(150)
    assert 250 < count * tokens <= 256  # a plan has no more rows


@pytest.mark.parametrize(
    "slow", [{"passing": 0.05}, {"row": 0.02}, {"right": 0}, {"sequences": 40, "row": 0.001, "passing": 0.01}]
)
def test_a_model_that_is_not_worth_it_is_tried_now_and_then(slow):
    machine = Machine(**slow)
    asked = sum(len(machine.chosen) > 0 for _ in range(300) if machine.run(1))
    assert 0 < asked < 25 and all(len(machine.chosen) <= 1 for _ in range(70) if machine.run(1))


def test_of_two_guesses_the_one_that_saves_more_is_made():
    """Four tokens of the model are right, at little cost."""
    machine = Machine(passing=1e-4, row=1e-6)
    machine.run(150)
    sequence = machine.sequences[0]
    sequence.draft.tokens = [5] * 6
    for expected, better in ((1.5, True), (3.0, True), (5.5, False)):
        sequence.draft.history = SimpleNamespace(expected=expected)
        assert bool(machine.drafts.saves_more([sequence], 4, 200)) == better
    sequence.draft.history.expected = 1.5
    machine.left[sequence.key] = 300  # to be read before
    assert not machine.drafts.saves_more([sequence], 4, 200)
    machine.left[sequence.key], sequence.sampler.matcher = 0, object()  # what a grammar forces is sure
    assert not machine.drafts.saves_more([sequence], 4, 200)
    assert not Machine(passing=0.05).drafts.saves_more([sequence], 4, 200)


def test_what_takes_longer_to_read_than_it_saves_is_not_read():
    """Sequences of 2,000 tokens, of which a few are to come, or many."""
    few, many = (Machine(unread=2000, reading=1e-3, most=most) for most in (20, 50_000))
    few.run(300)
    many.run(300)
    assert sum(few.left.values()) >= 6000 and not sum(many.left.values())


def test_sequences_that_the_model_cannot_go_on_with_are_not_chosen():
    for learnt in (0, 150):
        machine = Machine()
        machine.run(learnt)
        machine.unread = {s.key: None if s is machine.sequences[0] else 1 for s in machine.sequences}.get
        machine.drafts.model = SimpleNamespace(unread=lambda s, own=machine.unread: own(s.key))
        for _ in range(4):
            chosen = [s for s, _ in machine.drafts.choose(machine.sequences, 4, 256)]
            assert machine.sequences[0] not in chosen
            assert len(chosen) == (3 if learnt else len(chosen) and 1)


def test_what_was_not_tried_teaches_nothing_and_what_a_grammar_refused_was_wrong():
    machine = Machine(sequences=1)
    (sequence,), chances = machine.sequences, machine.drafts._chances
    machine.drafts.note(AskedDraft(sequence, 4, []), 4)
    machine.drafts.settle(sequence, None)
    assert not chances.drafts
    machine.drafts.note(AskedDraft(sequence, 4, [7, 8]), 3)  # two forced, one guessed
    machine.drafts.settle(sequence, 3)
    assert chances.drafts == 1 and chances.of(0) > 0.8 == chances.of(1)
    sequence.sampler.matcher = object()
    machine.drafts.note(AskedDraft(sequence, 4, []), 1)
    machine.drafts.settle(sequence, 1)
    assert chances.drafts == 2 and chances.of(1) < 0.8


def test_little_time_goes_into_reading_to_find_out():
    machine = Machine(sequences=200, unread=400, reading=1e-3, right=0)
    machine.run(400)
    assert sum(machine.left.values()) > 198 * 400 and machine.drafts._trials < 1
