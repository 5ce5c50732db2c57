"""Prefixes lie on as many R-ranks as their rows need, and on all of them where KV memory allows it."""

from __future__ import annotations

import pytest

from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.spread import Spread, has_many, shared_by_pairs, spread_of
from tests.support.scheduling import ListFeed, Machine

SIZES = {"batch": 64, "period": 1, "steps": 16, "block": 16, "prefill_tokens": 512}


def rows(documents, questions, length, system=0):
    """Rows of a system prompt that all share, a document that some share, and 32 tokens of their own; 17 new ones."""
    params = SamplingParams(max_tokens=17, ignore_eos=True)
    kinds = [i // questions for i in range(documents * questions)]
    ids = ([1] * system + [2 + kind] * length + [1000 + i] * 32 for i, kind in enumerate(kinds))
    return [Prompt(i, str(i), own, params) for i, own in enumerate(ids, 1)]


def run(these, ranks, capacity, **sizes):
    """Return a machine whose job is done, and the tokens and R-ranks of every prefix."""
    spread = spread_of([1] * len(these), shared_by_pairs(these))
    machine = Machine(
        ListFeed(these),
        capacity=[capacity] * ranks,
        shared=100_000,
        **{**SIZES, "spread": spread, "prefix_room": capacity * ranks // 4, **sizes},
    )
    prefixes, found = machine.schedulers[0].prefixes, []
    add = prefixes.add
    prefixes.add = lambda prefix: (found.append((prefix.prompt_length, prefix.ranks)), add(prefix))
    machine.run()
    assert len(machine.done) == len(these)
    machine.require_empty()
    return machine, found


def prefilled(machine):
    return sum(p.prefill_tokens for p in machine.steps)


def test_rows_that_begin_alike_are_counted_behind_what_all_have_in_common():
    these = rows(3, 4, 256, system=160)
    assert shared_by_pairs(these) == [416, 416, 416, 160, 416, 416, 416, 160, 416, 416, 416]
    assert spread_of([1] * len(these), shared_by_pairs(these)) == Spread(160, 4)
    assert spread_of([1], []) == Spread()
    short = rows(2, 2, 100)
    assert shared_by_pairs(short) == [0, 0, 0] and spread_of([1] * 4, [0, 0, 0]) == Spread(0, 1)
    these[1].adapter = 0
    assert shared_by_pairs(these)[:2] == [0, 0]


@pytest.mark.parametrize(
    ("rows", "tokens", "live", "room", "ranks"),
    [
        (16, 100, 0, 0, 8),  # all rows begin with it
        (16, 1000, 0, 0, 2),  # 16 of 64 rows: a quarter of 8 R-ranks
        (16, 1000, 0, 20_000, 5),  # a quarter of the room for 4 prefixes
        (16, 1000, 9, 20_000, 2),  # a tenth
        (16, 1000, 0, 99_000, 8),
        (1, 1000, 0, 3_000, 3),
        (1, 1000, 2, 3_000, 1),
        (500, 1000, 0, 0, 8),
    ],
)
def test_ranks_of_a_prefix(rows, tokens, live, room, ranks):
    assert Spread(common=128, rows=rows).ranks(tokens, live, 8, 64, room) == ranks


def test_a_prefix_has_many_users_with_twice_an_even_share():
    assert [has_many(users, 2, 8, 64) for users in (31, 32)] == [False, True]
    assert not has_many(99, 8, 8, 64)
    assert [has_many(users, 1, 8, 2) for users in (1, 2)] == [False, True]


@pytest.mark.parametrize(("capacity", "most"), [(40_000, 4), (2_600, 1)])
def test_documents_are_prefilled_once_each_wherever_their_rows_go(capacity, most):
    """With much KV memory they lie on all R-ranks, with little on one each."""
    these = rows(8, 16, 512)
    machine, found = run(these, 4, capacity)
    assert prefilled(machine) == 8 * 512 + 128 * 32
    assert [(tokens, len(ranks)) for tokens, ranks in found] == [(512, most)] * 8


def test_what_all_rows_begin_with_lies_on_all_ranks_and_documents_on_some():
    _, found = run(rows(8, 16, 512, system=160), 4, 2_000)
    assert {(tokens, len(ranks)) for tokens, ranks in found} == {(160, 4), (672, 1)}
    assert [tokens for tokens, _ in found].count(160) == 1


def test_a_copy_is_made_where_more_rows_come_than_were_expected():
    machine, found = run(rows(1, 64, 512), 4, 40_000, spread=Spread(), prefix_room=0)
    assert found == [(512, [0]), (512, [1, 2])]
    assert prefilled(machine) == 2 * 512 + 64 * 32


def test_a_copy_is_made_where_the_ranks_of_a_prefix_have_no_room():
    """An R-rank has room for a document and 10 rows."""
    machine, found = run(rows(1, 40, 512), 4, 512 + 10 * 64, spread=Spread(0, 10), prefix_room=0)
    assert found == [(512, [rank]) for rank in range(4)]
    assert prefilled(machine) == 4 * 512 + 40 * 32
