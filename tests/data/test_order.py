"""The order in which rows are worked on: those whose prompts begin alike follow each other."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.data.prompts import order
from hpcdecode.data.prompts.order import grouped, in_order
from hpcdecode.data.prompts.rows import Row, RowError
from hpcdecode.requests.params import SamplingParams

DOCUMENTS = ["a" * 700, "b" * 1000, "a" * 300 + "c" * 400]


def rows_of(prompts, **fields):
    given = {"prompt": None, "prompt_token_ids": None, "messages": None}
    return [
        Row(line=line, id=str(line), params=SamplingParams(), **{**given, **fields, name: prompt})
        for line, (name, prompt) in enumerate(prompts, 1)
    ]


def lines_of(rows, kept=None):
    return [row.line for row in in_order(rows, kept)]


def test_rows_about_a_document_follow_each_other_in_the_order_of_the_files():
    asked = [("prompt", text + question) for question in ("?", "!", ".") for text in DOCUMENTS]
    assert lines_of(rows_of(asked)) == [1, 4, 7, 3, 6, 9, 2, 5, 8]


def test_token_ids_and_messages_are_grouped_too_and_kinds_are_not_compared():
    asked = [("prompt_token_ids", [n] * 100 + [question]) for question in range(3) for n in range(2)]
    assert lines_of(rows_of(asked)) == [1, 3, 5, 2, 4, 6]
    chats = [[{"role": "user", "content": text}, {"role": "user", "content": q}] for q in "xyz" for text in DOCUMENTS]
    assert lines_of(rows_of([("messages", chat) for chat in chats])) == [1, 4, 7, 3, 6, 9, 2, 5, 8]
    mixed = rows_of([("prompt", DOCUMENTS[0]), ("prompt_token_ids", [1, 2]), ("prompt", DOCUMENTS[0])])
    assert sorted(lines_of(mixed)) == [1, 2, 3]


def test_messages_that_json_cannot_hold_stay_in_order():
    deep = []
    for _ in range(20_000):
        deep = [deep]
    odd = ["\ud800", object(), deep, 1 << 80]
    chats = [[{"role": "user", "content": content}] for content in (*odd, "plain", *odd)]
    assert sorted(lines_of(rows_of([("messages", chat) for chat in chats]))) == list(range(1, 10))


def test_what_has_little_or_all_in_common_keeps_its_order():
    draw = np.random.default_rng(0)
    texts = ["Translate: " + "".join(map(chr, draw.integers(97, 123, 200))) for _ in range(50)]
    assert lines_of(rows_of([("prompt", text) for text in texts])) == list(range(1, 51))
    system = "You are a helpful assistant. " * 20
    assert lines_of(rows_of([("prompt", system + text) for text in texts])) == list(range(1, 51))
    assert lines_of(rows_of([("prompt", system)] * 5)) == [1, 2, 3, 4, 5]
    assert lines_of([]) == []


def test_conversations_that_grow_are_one_group():
    turns = [f"turn {n:03d} " * 20 for n in range(40)]
    grown = ["".join(turns[: n + 1]) for n in range(40)]
    shuffled = np.random.default_rng(1).permutation(40)
    found = lines_of(rows_of([("prompt", grown[n]) for n in shuffled]))
    assert sorted(found) == list(range(1, 41))


def test_every_row_comes_once_and_neighbours_share_most():
    draw = np.random.default_rng(2)
    for _ in range(30):
        items = [
            (draw.integers(0, 2, draw.integers(0, 200)).tolist()[: draw.integers(0, 90)] * 2, n) for n in range(40)
        ]
        assert sorted(grouped(items)) == list(range(40))


def test_errors_are_passed_on_and_windows_are_bounded(monkeypatch):
    monkeypatch.setattr(order, "_WINDOW_ROWS", 4)
    asked = rows_of([("prompt", text + q) for q in ("?", "!", ".") for text in DOCUMENTS[:2]])
    assert lines_of([RowError(9, "9", "bad"), *asked]) == [9, 1, 3, 2, 4, 5, 6]
    monkeypatch.setattr(order, "_WINDOW_ROWS", 100)
    monkeypatch.setattr(order, "_WINDOW_BYTES", 3400)
    assert lines_of(asked) == [1, 3, 2, 4, 5, 6]
    assert lines_of(asked, kept=lambda line: 3000) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", [list, str])
def test_hostile_rows_take_no_long_time(kind):
    rows = [("prompt_token_ids", [5] * n) if kind is list else ("prompt", "x" * n) for n in range(1, 3000)]
    assert len(lines_of(rows_of(rows))) == 2999
