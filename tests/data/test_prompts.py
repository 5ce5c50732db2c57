"""Prompt files: what is read, what becomes a row error, and that no line stops the reader."""

import json
import os
import random

import pytest

from hpcdecode.data.prompts import files as inputs
from hpcdecode.data.prompts import rows as prompts
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=32, temperature=0.5)


def read(tmp_path, data):
    path = tmp_path / "p.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(read_rows([str(path)], DEFAULTS))


def read_one(tmp_path, data):
    (row,) = read(tmp_path, data if isinstance(data, (bytes, str)) else json.dumps(data))
    return row


def test_the_three_kinds_of_rows(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a b"}, {"prompt_token_ids": [1, 2]}, {"messages": chat}]
    rows = read(tmp_path, "\n".join(json.dumps(line) for line in lines))
    assert [r.line for r in rows] == [1, 2, 3]
    assert (rows[0].prompt, rows[0].prompt_token_ids, rows[0].messages) == ("a b", None, None)
    assert (rows[1].prompt, rows[1].prompt_token_ids, rows[1].messages) == (None, [1, 2], None)
    assert (rows[2].prompt, rows[2].prompt_token_ids, rows[2].messages) == (None, None, chat)
    assert all(r.params is DEFAULTS for r in rows)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "1"),
        ({"id": "x/7"}, "x/7"),
        ({"id": 7}, "7"),
        ({"custom_id": "c"}, "c"),
        ({"id": None, "custom_id": 3}, "3"),
        ({"id": "both", "custom_id": "c"}, "both"),
        ({"id": "日本 😀"}, "日本 😀"),
    ],
)
def test_id(tmp_path, fields, expected):
    assert read_one(tmp_path, {"prompt": "a", **fields}).id == expected


def test_a_rows_own_fields_win_over_the_jobs(tmp_path):
    own = {"max_tokens": 5, "temperature": 1, "top_k": 3, "top_p": 0.5, "seed": 9, "stop_token_ids": [4, 5]}
    row = read_one(tmp_path, {"prompt": "a", "ignore_eos": True, **own})
    assert row.params == SamplingParams(**{**own, "temperature": 1.0, "stop_token_ids": (4, 5), "ignore_eos": True})
    assert type(row.params.temperature) is float
    own = {"stop": "\n", "bad_words": ["x"], "logit_bias": {"7": -1}, "truncate_prompt_tokens": -1, "min_p": 0}
    row = read_one(tmp_path, {"prompt": "a", **own})
    assert (row.params.stop, row.params.bad_words, row.params.logit_bias) == (("\n",), ("x",), {7: -1.0})
    assert row.params.truncate_prompt_tokens == -1 and row.params.temperature == DEFAULTS.temperature


def test_null_fields_count_as_absent(tmp_path):
    row = read_one(tmp_path, {"prompt": "a", "messages": None, "max_tokens": None, "stop": None, "id": None})
    assert row == Row(1, "1", "a", None, None, DEFAULTS)


def test_metadata_columns_are_ignored(tmp_path):
    row = read_one(tmp_path, {"prompt": "a", "label": 3, "meta": {"n": [1, {}]}, "": "x"})
    assert row.prompt == "a"


def test_bom_crlf_blank_lines_and_a_last_line_without_newline(tmp_path):
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b"}\r\n\n{"prompt": "c"}'
    assert [(r.line, r.prompt) for r in read(tmp_path, data)] == [(1, "a"), (4, "b"), (6, "c")]


def test_an_empty_file_has_no_rows(tmp_path):
    assert read(tmp_path, b"") == []
    assert read(tmp_path, b"\xef\xbb\xbf\n") == []


def test_duplicate_ids_and_unicode_line_separators_are_kept(tmp_path):
    rows = read(tmp_path, '{"prompt": "a\u2028b\x85", "id": 1}\n{"prompt": "c", "id": 1}\n')
    assert [(r.id, r.prompt) for r in rows] == [("1", "a\u2028b\x85"), ("1", "c")]


HOSTILE = [
    (b"{", "invalid JSON"),
    (b"\xff\xfe{\x00", "invalid UTF-8"),
    (b"prompt: a", "invalid JSON"),
    (b'{"prompt": "a"} {"prompt": "b"}', "invalid JSON"),
    (b"\x00\x00\x00", "invalid JSON"),
    (b'{"prompt": "a\x00b"}', "invalid JSON"),
    (b'{"prompt": "\xff"}', "invalid UTF-8"),
    (b'{"prompt": "\\ud800"}', "invalid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid JSON"),
    (b'{"prompt": "a", "x": ' + b"[" * 200_000, "nested too deeply"),
    (b'{"prompt": "a", "x": 1' + b"0" * 5000 + b"}", "out of range"),
    (b"[1]", "expected a JSON object, got a list"),
    (b'"a"', "expected a JSON object, got a string"),
    (b"null", "expected a JSON object, got null"),
    (b"{}", "exactly one of prompt, prompt_token_ids, messages, got none"),
    (b'{"prompt": "a", "messages": [{"role": "user"}]}', "got prompt and messages"),
    (b'{"prompt": ""}', "prompt: expected a string that is not empty"),
    (b'{"prompt": 5}', "prompt: expected a string, got an integer 5"),
    (b'{"prompt": ["a"]}', "prompt: expected a string, got a list of 1 elements"),
    (b'{"prompt_token_ids": []}', "prompt_token_ids: expected at least one"),
    (b'{"prompt_token_ids": "1 2"}', "prompt_token_ids: expected a list of token ids, got a string"),
    (b'{"prompt_token_ids": [1, -2]}', "got an integer -2 at index 1"),
    (b'{"prompt_token_ids": [1.0]}', "got a float 1.0 at index 0"),
    (b'{"prompt_token_ids": [true]}', "got a boolean true at index 0"),
    (b'{"prompt_token_ids": [4294967296]}', "got an integer 4294967296 at index 0"),
    (b'{"messages": {}}', "messages: expected a list of messages, got an object"),
    (b'{"messages": ["hi"]}', "messages[0]: expected an object, got a string"),
    (b'{"messages": [{"content": "hi"}]}', "messages[0].role: expected a string, got null"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content: expected a string or a list"),
    (b'{"prompt": "a", "id": 1.5}', "id: expected a string or an integer, got a float 1.5"),
    (b'{"prompt": "a", "id": true}', "id: expected a string or an integer, got a boolean true"),
    (b'{"prompt": "a", "id": "x\\u0000"}', "id: expected at most 4096 characters without NUL"),
    (b'{"prompt": "a", "max_tokens": 5.0}', "max_tokens: expected a 64-bit integer, got a float 5.0"),
    (b'{"prompt": "a", "max_tokens": "5"}', 'max_tokens: expected a 64-bit integer, got a string "5"'),
    (b'{"prompt": "a", "max_tokens": true}', "max_tokens: expected a 64-bit integer, got a boolean true"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens: expected an integer >= 1, got 0"),
    (b'{"prompt": "a", "max_tokens": 99999999999999999999}', "max_tokens: expected a 64-bit integer"),
    (b'{"prompt": "a", "temperature": -1}', "temperature: expected a finite number >= 0"),
    (b'{"prompt": "a", "temperature": true}', "temperature: expected a number, got a boolean true"),
    (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature: expected a finite number"),
    (b'{"prompt": "a", "top_p": 0}', "top_p: expected a number in (0, 1]"),
    (b'{"prompt": "a", "ignore_eos": 1}', "ignore_eos: expected true or false, got an integer 1"),
    (b'{"prompt": "a", "stop_token_ids": 3}', "stop_token_ids: expected a list of integers, got an integer 3"),
    (b'{"prompt": "a", "stop_token_ids": [1, "2"]}', "stop_token_ids[1]: expected a 64-bit integer, got a string"),
    (b'{"prompt": "a", "best_of": 2}', "best_of: not supported yet, got 2"),
    (b'{"prompt": "a", "best_of": true}', "best_of: not supported yet"),
    (b'{"prompt": "a", "n": 0}', "n: expected an integer in [1, 65535], got 0"),
    (b'{"prompt": "a", "stop": ["\\n", 3]}', "stop[1]: expected a string, got an integer 3"),
    (b'{"prompt": "a", "stop": [""]}', "stop: expected strings that are not empty"),
    (b'{"prompt": "a", "logit_bias": {"a": 1}}', 'logit_bias: expected token ids as keys, got "a"'),
    (b'{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias: expected numbers in [-100, 100], got 101.0"),
    (b'{"prompt": "a", "min_tokens": 50}', "min_tokens: expected an integer in [0, 32 (max_tokens)], got 50"),
    (b'{"prompt": "a", "min_p": 1.5}', "min_p: expected a number in [0, 1], got 1.5"),
    (b'{"prompt": "a", "presence_penalty": -3}', "presence_penalty: expected a number in [-2, 2], got -3.0"),
    (b'{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty: expected a finite number > 0, got 0.0"),
    (b'{"prompt": "a", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens: expected an integer >= 1, or -1"),
    (b'{"prompt": "a", "logprobs": 21}', "logprobs: expected an integer in [0, 20], got 21"),
    (b'{"prompt": "a", "logprobs": true, "top_logprobs": "x"}', "logprobs: expected a 64-bit integer, got a string"),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "tools[0]: expected an object with type"),
]


@pytest.mark.parametrize(("data", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_line_is_one_row_error_between_good_rows(tmp_path, data, reason):
    before, error, after = read(tmp_path, b'{"prompt": "a"}\n' + data + b'\n{"prompt": "b"}\n')
    assert (before.prompt, after.prompt, after.line) == ("a", "b", 3)
    assert isinstance(error, RowError) and error.line == 2
    assert reason in error.reason
    assert len(error.reason) <= prompts.MAX_REASON_CHARACTERS


def test_sampling_values_that_ask_for_nothing_are_accepted(tmp_path):
    neutral = {"best_of": 1, "logits_processors": [], "use_beam_search": False}
    assert read_one(tmp_path, {"prompt": "a", **neutral}).params is DEFAULTS


def test_an_error_carries_the_rows_own_id_where_it_has_one(tmp_path):
    assert read_one(tmp_path, {"prompt": "", "id": "x"}).id == "x"
    assert read_one(tmp_path, {"id": []}).id == "1"


def test_a_line_beyond_the_limit_is_refused_without_being_held(tmp_path, monkeypatch):
    for module in (inputs, prompts):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    exact = b'{"prompt": "' + b"x" * 985 + b'"}\n'
    rows = read(tmp_path, exact + b'{"prompt": "' + b"x" * 5_000_000 + b'"}\n{"prompt": "b"}\n' + b"y" * 1001)
    assert [type(r) for r in rows] == [Row, RowError, Row, RowError]
    assert "at most 1000 bytes" in rows[1].reason and rows[2].line == 3


def test_a_line_of_50_megabytes_is_read(tmp_path):
    rows = read(tmp_path, b'{"prompt": "' + b"x" * 50_000_000 + b'"}\n{"prompt": "b"}\n')
    assert [len(r.prompt) for r in rows] == [50_000_000, 1]


def test_random_damage_never_raises(tmp_path):
    rng = random.Random(7)
    good = json.dumps(
        {"id": 3, "prompt": "é a", "temperature": 0.5, "stop_token_ids": [1], "meta": {"a": [1.5]}}
    ).encode()
    lines = []
    for _ in range(2000):
        line = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            line[rng.randrange(len(line))] = rng.choice(b'\x00\xff"{}[],:0-e\\aA\x80')
        lines.append(bytes(line))
    rows = read(tmp_path, b"\n".join(lines))
    assert [r.line for r in rows] == list(range(1, 2001))
    assert {type(r) for r in rows} == {Row, RowError}


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "missing/p.jsonl"])
def test_a_file_that_cannot_be_opened_is_a_user_error_at_once(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="reading failed: "):
        read_rows([str(tmp_path / name)], DEFAULTS)


def test_rows_come_before_the_file_has_ended(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)
    os.write(end, b'{"prompt": "a"}\n')
    assert next(read_rows([str(path)], DEFAULTS)).prompt == "a"
    os.close(end)
