"""What `bench attention --mixed` plays back, against schedules worked out by hand."""

from __future__ import annotations

import pytest

from hpcdecode.bench.mixed import LOADS, Item, MixedStep, cases, play_apart, play_together
from tests.support.attention_cases import shape


def test_apart_ends_each_kind_before_the_next():
    items = [
        Item("pack", 0, 0, 1.0, 1.0),
        Item("pack", 0, 256, 1.0, 1.0),  # of the same head: one item of today's
        Item("prompt", 0, 32, 4.0, 4.0),
        Item("attend", 0, 0, 3.0, 3.0),
        Item("prompt", 0, 0, 2.0, 2.0),
        Item("attend", 1, 0, 2.0, 2.0),
        Item("append", 0, 0, 0.0, 1.0),
    ]
    assert play_apart(items, 2) == 1 + 3 + 2 + 4
    assert play_apart(items, 1) == sum(item.seconds for item in items)


def test_together_fills_the_gaps():
    items = [
        Item("pack", 0, 0, 1.0, 1.0),
        Item("prompt", 0, 32, 6.0, 6.0),
        Item("attend", 0, 0, 3.0, 3.0),  # while the other packs, and on
        Item("attend", 1, 0, 3.0, 3.0),
        Item("append", 0, 0, 0.0, 1.0),
    ]
    assert play_together(items, 2) == 7  # packs 0-1, the prompt 1-7; rows 0-3 and 3-6, append 6-7
    assert play_together(items, 1) == sum(item.seconds for item in items)
    waits = [Item("pack", 0, 0, 1.0, 2.0), Item("prompt", 0, 0, 3.0, 3.0), Item("prompt", 1, 0, 3.0, 3.0)]
    assert play_together(waits, 2) == 5  # nothing else to do while the other packs


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_every_load_gives_the_same_bits_both_ways(load):
    step = MixedStep(shape(1, 16, 2), load, 2)
    step.verify()
    timed = step.timed(step.together)
    assert timed.seconds > 0 and 0 <= timed.waits < 1
    items = step.items(1)
    work = sum(item.seconds for item in items)
    assert work / 4 <= play_together(items, 4) <= work and work / 4 <= play_apart(items, 4) <= work


def test_cases_say_time_and_waits(monkeypatch):
    monkeypatch.setattr("hpcdecode.bench.mixed.SHAPES", {"tiny": shape(1, 8, 2)})
    monkeypatch.setattr("hpcdecode.bench.mixed.LOADS", LOADS[:1])
    found = cases([1], [8], 2)
    assert [case["case"].rpartition(", ")[2] for case in found] == [
        "1 threads: time",
        "1 threads: threads wait",
        "8 threads played: time",
        "8 threads played: threads wait",
    ]
    assert all(case["value"] >= 0 and case["reference"] == "one kind after the other" for case in found)
