"""Warnings about roles and ids, and what they remember."""

from __future__ import annotations

import json
import sys

import pytest

from hpcdecode.data.prompts import doubts
from hpcdecode.data.prompts.doubts import RepeatedIds, UnknownRoles
from hpcdecode.data.prompts.rows import read_rows
from hpcdecode.requests.params import SamplingParams


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("asistent", "did you mean 'assistant'?"),
        ("User", "did you mean 'user'?"),
        ("human", "did you mean 'user'?"),
        ("gpt", "did you mean 'assistant'?"),
        ("narrator", "most chat templates know system, user, assistant, tool"),
    ],
)
def test_an_unknown_role_is_told_once(role, hint):
    said = []
    roles = UnknownRoles(said.append)
    for line in (1, 2):
        roles.row(f"line {line}", [{"role": "user"}, {"role": role}])
    assert said == [f'line 1: messages[1].role "{role}" is not known; {hint}']


def test_known_roles_are_not_told_and_many_are_not_remembered():
    said = []
    roles = UnknownRoles(said.append)
    roles.row("line 1", [{"role": role} for role in (*doubts.ROLES, "ipython")])
    assert not said
    roles.row("line 2", [{"role": f"r{n}"} for n in range(1000)])
    assert len(said) == doubts.MAX_WARNINGS


def test_ids_that_repeat_are_told_three_times():
    said = []
    ids = RepeatedIds(said.append)
    for line, row_id in enumerate("abcaabcc", 1):
        ids.row(line, row_id)
    assert said == [
        'line 4: id "a" is that of line 1, too',
        'line 5: id "a" is that of line 1, too',
        'line 6: id "b" is that of line 2, too',
        "line 7: more ids repeat, which is not said again",
    ]


def test_memory_for_ids_is_bounded(monkeypatch):
    monkeypatch.setattr(doubts, "MAX_IDS", 1 << 12)
    said = []
    ids = RepeatedIds(said.append)
    for line in range(1, 20_001):
        ids.row(line, f"id-{line}")
    assert not said
    assert sys.getsizeof(ids._hashes) + sys.getsizeof(ids._lines) < 16 * 2 * 2 * (1 << 12)
    ids.row(20_001, "id-4096")
    ids.row(20_002, "id-4097")  # not remembered any more
    assert said == ['line 20001: id "id-4096" is that of line 4096, too']


def test_rows_of_files_are_compared_and_line_numbers_are_no_ids(tmp_path, caplog):
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "b"}, {"prompt": "c", "custom_id": "x"}, {"prompt": "d"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(list(read_rows([str(tmp_path / "p.jsonl")], SamplingParams()))) == 4
    assert caplog.messages == ['hpcdecode: warning: line 3: id "x" is that of line 1, too']
