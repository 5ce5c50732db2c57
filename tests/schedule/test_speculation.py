"""Speculative decoding without a model: no R-rank overflows, sequences end as long as they should, and sooner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.attention.footprint import WHOLE
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.schedule.optimistic import OptimisticPlacement
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import MOST_DRAFTED_ROWS
from hpcdecode.schedule.speculation import Speculation
from tests.support.families import SCHEDULED, WINDOWED, run_families
from tests.support.preemption import hasty_placement
from tests.support.scheduling import ListFeed, Machine, prompts

CASES = {**SCHEDULED, "guesses": st.sampled_from([0.0, 0.5, 0.9, 1.0])}
RATES = {"rate": st.sampled_from([0.0, 0.1, 0.5]), "growth": st.sampled_from([1, 4])}


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_families_are_done_once_in_the_room_that_there_is(**case):
    run_families(**case)


@settings(max_examples=60, deadline=None)
@given(**CASES, **RATES)
def test_so_are_those_that_are_preempted(rate, **case):
    run_families(placement=hasty_placement(rate), **case)


@settings(max_examples=40, deadline=None)
@given(**{**CASES, **WINDOWED}, **RATES)
def test_so_are_those_of_which_windows_let_tokens_go(rate, **case):
    run_families(placement=hasty_placement(rate), **case)


@pytest.mark.full
@settings(max_examples=3000, deadline=None)
@given(**CASES, **RATES)
def test_thousands_of_families(rate, **case):
    run_families(**{name: value for name, value in case.items() if name != "growth"})
    run_families(placement=hasty_placement(rate), **case)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(**{**CASES, **WINDOWED}, **RATES)
def test_a_thousand_families_with_windows(rate, **case):
    run_families(placement=hasty_placement(rate), **case)


def test_wrong_guesses_take_no_room_that_other_lanes_count_on():
    """A row that is ahead, and then is not, ends no earlier than before."""
    rows = [(1, 1, 1), (1, 15, 1), (7, 15, 1), (38, 10, 3)]  # prompt tokens, max_tokens, samples
    families = [(prompt, most, [None] * samples, [], (0, 0)) for prompt, most, samples in rows]
    sizes = {"prefill_tokens": 8, "batch": 4, "period": 1, "lanes": 3, "block": 1, "capacity": [100], "shared": 0}
    run_families(rows=families, schedule="fixed-f", load=300, guesses=0.0, **sizes)


SIZES = {"batch": 8, "period": 1, "steps": 39, "block": 16, "schedule": "fifo"}


def steps_of(guesses, capacity=(10_000,), **sizes):
    rows = ListFeed(prompts([(10, 40)] * 8))
    return Machine(rows, capacity=list(capacity), guesses=guesses, **{**SIZES, **sizes}).run()


def test_right_guesses_take_fewer_steps():
    plain, right, wrong = (steps_of(guesses) for guesses in (None, 1.0, 0.0))
    assert plain.now > 40 and right.now < plain.now / 2 and wrong.now == plain.now
    speculation = right.schedulers[0].speculation
    assert speculation.confirmed == speculation.drafted > 200
    assert wrong.schedulers[0].speculation.confirmed == 0 < wrong.schedulers[0].speculation.drafted


def test_they_help_in_part_where_room_counts_on_rows_that_end_one_after_the_other():
    """Eight rows of 50 tokens need 512 if all are long at once."""
    tight, least = steps_of(1.0, [300]), steps_of(None, [300])
    assert tight.schedulers[0].speculation.confirmed > 0 and tight.now < least.now


CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_max=3, prompt_lookup_min=2)


def sequence_of(ids, generated, most=100):
    request = Request(Prompt(1, "1", ids, SamplingParams(max_tokens=most)), most, 0)
    return SequenceState(request, rank=0, slot=0, prefilled=len(ids), generated=generated)


def drafted(config=CONFIG, capacity=1000, **given):
    placement = Placement([capacity], WHOLE, 1)
    speculation, sequence = Speculation(config, placement), sequence_of(**given)
    placement.add(sequence)
    speculation.draft([sequence])
    return speculation, sequence


def test_a_draft_continues_what_was_there_and_counts_as_tokens_to_come():
    _, sequence = drafted(ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2], generated=[3])
    assert sequence.draft.tokens == [4, 5, 6, 7, 8, 9, 10, 11] and sequence.ahead == 8


def test_a_draft_ends_where_the_row_must():
    for most, expected in ((4, [4, 5]), (3, [4]), (2, [])):
        assert drafted(ids=[1, 2, 3, 4, 5, 6, 1, 2], generated=[3], most=most)[1].draft.tokens == expected


def test_there_is_none_without_settings_or_room():
    ids = [1, 2, 3, 4, 5, 6, 1, 2]
    speculation, sequence = drafted(config=None, ids=ids, generated=[3])
    assert not sequence.draft.tokens and sequence.draft.history is None
    speculation.settle([sequence])
    _, sequence = drafted(ids=ids, generated=[3], capacity=50)
    assert not sequence.draft.tokens and sequence.ahead == 0


def test_tokens_that_were_wrong_leave_the_kv_cache_with_the_next_plan():
    speculation, sequence = drafted(ids=[1, 2, 3, 4, 5, 6, 1, 2], generated=[3])
    sequence.generated += [4, 5, 9]  # two of the draft, and what came in place of the third
    speculation.settle([sequence])
    assert (speculation.drafted, speculation.confirmed) == (8, 2)
    assert sequence.ahead == 8  # until the plan that shortens its slot
    assert speculation.take_unconfirmed(0) == [(0, 0, 11)] and not speculation.take_unconfirmed(0)
    assert (sequence.ahead, sequence.start_step) == (0, -2) and not sequence.draft.tokens


def test_guesses_that_fail_are_made_less_often_where_rows_cost_something():
    speculation, sequence = drafted(ids=[1, 2, 3, 4, 5, 6, 1, 2], generated=[3])
    assert sequence.draft.tokens
    for step in range(1, 30):
        speculation.price.observe(0.001 * (4 + step % 3), 4 + step % 3, 4)
        for token in (50 + step, 1, 2):  # nothing else that comes twice follows itself
            sequence.generated.append(token)
            speculation.settle([sequence])
            speculation.draft([sequence])
    assert speculation.price.value > 0.5 and speculation.confirmed == 0 < speculation.drafted < 30
    assert not sequence.draft.tokens


def test_drafts_of_many_sequences_have_no_more_rows_than_a_plan():
    placement = Placement([1 << 20], WHOLE, 1)
    speculation = Speculation(CONFIG, placement)
    sequences = [sequence_of([*range(20), 1, 2], [3]) for _ in range(100)]
    for sequence in sequences:
        placement.add(sequence)
    speculation.draft(sequences)
    assert sum(len(s.draft.tokens) for s in sequences) == 100 // 8 + 8  # what rows cost is not known yet
    for step in range(1, 10):
        speculation.price.observe(0.1, 100 + step, 100)
    assert speculation.price.value == 0 == speculation.price.tried_rows(9)
    speculation.draft(sequences)
    assert sum(len(s.draft.tokens) for s in sequences) == MOST_DRAFTED_ROWS


def test_optimistic_rows_are_ahead_while_claims_have_room():
    """What the rows may take in the end has none: 8 rows of 50 tokens, in 20 blocks of 16."""
    machine = steps_of(1.0, [20 * 16], placement=OptimisticPlacement)
    assert machine.schedulers[0].speculation.confirmed > 100
    machine.require_empty()
