"""Rows dealt out to lanes and S-ranks: those that begin alike to one, each once; nobody waits while there are any."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.data.prompts import dealer as module
from hpcdecode.data.prompts.dealer import Dealer, PromptList, begin_alike
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt


def prompt(line, document=0, tokens=160, adapter=-1):
    return Prompt(line, str(line), [document] * tokens + [1000 + line], SamplingParams(), adapter=adapter)


def dealt(prompts):
    source = PromptList()
    source.add(prompts)
    return Dealer(source)


def take(dealer, taker):
    found = dealer.peek(taker)
    return None if found is None else dealer.pop(taker).line


def documents(*numbers):
    return [prompt(line, number) for line, number in enumerate(numbers, 1)]


def test_rows_that_begin_alike_go_to_one_taker():
    dealer = dealt(documents(7, 7, 7, 8, 8, 8, 9))
    assert [take(dealer, taker) for taker in (0, 1, 0, 1, 0, 1)] == [1, 4, 2, 5, 3, 6]
    assert take(dealer, 0) == 7 and take(dealer, 1) is None and not dealer.waiting


def test_what_waits_for_others_is_taken_at_last():
    dealer = dealt(documents(7, 7, 7, 7, 8))
    assert [take(dealer, taker) for taker in (0, 1)] == [1, 5]
    assert dealer.waiting == 3
    assert [take(dealer, 1) for _ in range(3)] == [3, 4, 2] and take(dealer, 0) is None


def test_half_of_what_waits_for_another_is_taken():
    dealer = dealt(documents(7, 7, 7, 7, 7, 7, 8))
    assert [take(dealer, taker) for taker in (0, 1, 1, 0, 1, 0, 1)] == [1, 7, 4, 2, 5, 3, 6]


def test_hands_are_bounded_and_then_the_group_is_that_of_both(monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 3)
    dealer = dealt(documents(*[7] * 10))
    assert [take(dealer, taker) for taker in (0, 1, 1, 0, 1)] == [1, 5, 6, 2, 7]
    monkeypatch.setattr(module, "_MOST_TOKENS", 200)
    dealer = dealt(documents(*[7] * 10))
    assert [take(dealer, taker) for taker in (0, 1, 0, 1)] == [1, 4, 2, 5]


def test_the_rows_of_a_taker_that_is_gone_come_back():
    dealer = dealt(documents(7, 7, 7, 8))
    assert [take(dealer, taker) for taker in (-1, 0)] == [1, 4]
    assert [p.line for p in dealer.drop(-1)] == [2, 3] and not dealer.waiting
    assert dealer.drop(-5) == [] and take(dealer, 0) is None


def test_what_begins_alike():
    assert begin_alike(prompt(1), prompt(2)) and not begin_alike(prompt(1), prompt(2, document=3))
    assert not begin_alike(prompt(1), prompt(2, adapter=0))
    assert not begin_alike(prompt(1, tokens=100), prompt(2, tokens=100)), "too short to share"
    assert begin_alike(prompt(1), prompt(2, tokens=100)) and not begin_alike(prompt(1, tokens=400), prompt(2))


@pytest.mark.parametrize("takers", [1, 2, 5])
def test_every_row_is_taken_once(takers):
    draw = np.random.default_rng(takers)
    source, arrived, taken = PromptList(), 0, []
    dealer = Dealer(source)
    while len(taken) < 300:
        more = [prompt(arrived + i, int(draw.integers(0, 5))) for i in range(draw.integers(0, 8))]
        more = more[: 300 - arrived]
        source.add(more)
        arrived += len(more)
        found = take(dealer, int(draw.integers(0, takers)))
        assert (found is None) == (arrived == len(taken)), "a row is there, and is not given out"
        taken += [] if found is None else [found]
    assert sorted(taken) == list(range(300))
