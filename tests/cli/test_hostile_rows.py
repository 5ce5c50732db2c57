"""2,000 lines that nobody should write, among good ones: each an error, and the good rows as without them."""

from __future__ import annotations

import json
import random

import h5py
import pytest

from hpcdecode.config import Job
from hpcdecode.generate import ROW_ERRORS, generate
from hpcdecode.requests.params import SamplingParams
from tests.support.models import VOCAB

HOSTILE, GOOD = 2000, 60
WRONG = {  # values that a field cannot have
    "prompt": ["", 7, 1.5, True, [], ["a"], {}, {"text": "a"}],
    "prompt_token_ids": [
        [],
        "5",
        5,
        {},
        [-1],
        [VOCAB],
        [2**31],
        [2**63],
        [10**30],
        [1.0],
        [True],
        ["5"],
        [None],
        [[5]],
    ],
    "messages": [[], "hi", {}, [{}], ["hi"], [None], [{"role": 7}], [{"role": ""}], [{"role": "user", "content": 7}]],
    "id": [1.5, True, [], {}, "a\0b", "x" * 5000],
    "max_tokens": [0, -1, 1.0, "8", True, [], 2**63, 10**400, 1000],  # the KV cache has no room for the last
    "min_tokens": [-1, 9, "1", 10**30],
    "temperature": [-1, "1", True, [], 10**400, -(10**400)],
    "top_k": [-2, 1.5, "5", 2**64],
    "top_p": [0, -0.5, 1.1, "1", 10**400],
    "min_p": [-0.1, 2, [0]],
    "presence_penalty": [3, -3, "0"],
    "repetition_penalty": [0, -1, 10**400],
    "logit_bias": [[], 5, {"-1": 1}, {"9" * 30: 1}, {str(VOCAB): 1}, {"5": 1000}, {"5": "x"}, {"x": 1}, {"5": None}],
    "bad_words": [[""], 5, [5], {}],
    "seed": [-1, 1.5, "0", 2**63],
    "stop": [[""], "", 5, [5], {}, [None]],
    "stop_token_ids": [[-1], [VOCAB], [2**70], "5", [1.5], {}],
    "ignore_eos": [0, "yes", []],
    "truncate_prompt_tokens": [0, -2, 1.5, 2**64],
    "structured_outputs": [{}, 5, {"regex": "(a"}, {"regex": "a", "choice": ["a"]}, {"json": {"type": "x"}}],
    "response_format": [5, {}, {"type": "json_schema"}],
    "best_of": [3, 1.5, "2"],
    "tools": [[{"type": "function"}]],
}
RAW = (
    *(
        b"[]",
        b"7",
        b'"text"',
        b"null",
        b"true",
        b"NaN",
        b"{}",
        b"{",
        b"}",
        b"\0",
        b"\xff\xfe",
        b"{}{}",
        b"{'prompt': 'a'}",
    ),
    b"[" * 100_000 + b"]" * 100_000,
    b"[" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"prompt": "a", "meta": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    *(
        b'{"prompt": "a\xc3"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\0b"}',
        b'{"prompt": "a\tb"}',
        b'{"prompt": "\\ud800"}',
    ),
    *(
        b'{"prompt": "a", "prompt": 7}',
        b'{"prompt": "a", "max_tokens": 4, "max_tokens": "4"}',
        b'{"prompt": "a", "id": 1,}',
    ),
    *(b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "seed": 1e5}', b'{"prompt": "a", "top_p": NaN}'),
    b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    *(b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', b'{"text": "a"}', b'{"prompt": null}'),
    b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}}',
    b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}',
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": [1]}',
    b'{"messages": [{"role": "user", "content": null}]}',  # the model's chat template takes text
    json.dumps({"prompt_token_ids": [5] * 5000}).encode(),
    json.dumps({"prompt": "word " * 20_000}).encode(),
)


def hostile(count):
    """Lines that cannot be used, all different in kind or content; a strict beginning of an object never is one."""
    draw = random.Random(5)
    for value in RAW:
        yield value
    for name, values in WRONG.items():
        for value in values:
            yield json.dumps(
                {"prompt": "a", name: value} if name not in ("messages", "prompt_token_ids") else {name: value}
            ).encode()
    made = len(RAW) + sum(map(len, WRONG.values()))
    whole = json.dumps({"prompt": "some text", "id": "x", "max_tokens": 5, "stop": ["a", "b"]}).encode()
    for number in range(count - made):
        if number % 3 == 0:
            yield whole[: draw.randrange(1, len(whole))]
        elif number % 3 == 1:
            yield bytes(draw.choice(b'\x00\x01\x7f\xfe[]:,"\\0e-x') for _ in range(draw.randrange(1, 200)))
        else:
            at = draw.randrange(len(whole))
            yield whole[:at] + b"\xff" + whole[at + 1 :]


def good(number):
    row = {
        "prompt": "if x" + "é😀\0"[number % 3 :] * (number % 4),
        "id": f"good {number}",
        "max_tokens": 3 + number % 6,
    }
    if number % 2:
        row |= {"temperature": 0.9, "seed": number, "meta": [10**15, {"deep": [[[]]]}]}
    return json.dumps(row).encode()


def contents(path):
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        rows = {name: file["rows"][name][:].tolist() for name in file["rows"] if not name.endswith("_at")}
        return rows, {name: file["errors"][name][:].tolist() for name in file["errors"]}


@pytest.fixture(scope="module")
def lines():
    found, draw = list(hostile(HOSTILE)), random.Random(6)
    assert len(found) == HOSTILE
    found[100:100] = [b'{"prompt": "' + b"word " * (10 << 20) + b'"}']  # 50 MB
    found += [b"x" * (65 << 20)]
    found = [(line, True) for line in found]
    for number in range(GOOD):
        found.insert(draw.randrange(len(found)), (good(number), False))
    return found


def test_every_hostile_line_is_an_error_and_the_good_rows_are_as_without_them(checkpoint, tmp_path, lines):
    kept = {}
    for name in ("all", "good"):
        with open(tmp_path / f"{name}.jsonl", "wb") as file:
            for line, bad in lines:
                file.write((b"" if bad and name == "good" else line) + b"\n")
        job = Job(
            prompts=(str(tmp_path / f"{name}.jsonl"),),
            model=str(checkpoint("llama3")),
            output=str(tmp_path / f"{name}.h5"),
            params=SamplingParams(max_tokens=8),
            dtype="float32",
            kv_memory=200_000,
        )
        assert generate(job) == (ROW_ERRORS if name == "all" else 0)
        kept[name] = contents(tmp_path / f"{name}.h5")
    numbers = {bad: [n for n, (_, b) in enumerate(lines, 1) if b is bad] for bad in (True, False)}
    rows, errors = kept["all"]
    assert rows == kept["good"][0] and rows["line"] == numbers[False]
    assert errors["line"] == numbers[True], set(numbers[True]) ^ set(errors["line"])
    assert all(0 < len(reason) <= 500 and b"\n" not in reason for reason in errors["reason"])
    assert len(set(errors["reason"])) > 100
