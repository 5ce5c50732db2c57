"""Sampling parameters through the command line, on one rank and with two S-ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from hpcdecode import read
from tests.support.commands import Command

PROMPTS = Path(__file__).parents[2] / "jobs" / "demo" / "prompts.jsonl"
FLAGS = ("--model", "demo", "--dtype", "float32", "--max-tokens", 24, "--limit", 8, "--overwrite")


def rows(path):
    with read(path) as results:
        return {row["line"]: (row["text"], row["finish_reason"], list(map(int, row["token_ids"]))) for row in results}


def run(command, *flags, prompts=PROMPTS, ranks=1):
    result = command("generate", prompts, "-o", "out.h5", *FLAGS, *flags, ranks=ranks)
    assert result.returncode == 0, result.stderr
    return rows(command.directory / "out.h5")


@pytest.fixture
def generate(hpcdecode):
    return partial(run, hpcdecode)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, forkserver):
    return run(Command(tmp_path_factory.mktemp("plain"), forkserver))


def test_stop_strings_end_rows_on_any_number_of_s_ranks(plain, generate, tmp_path):
    texts = {line: text for line, (text, *_) in plain.items()}
    stops = {line: text[len(text) // 3 : len(text) // 3 + 7] for line, text in texts.items()}  # across tokens
    given = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:8]]
    lines = [json.dumps({**row, "stop": ["nowhere", stops[line]]}) for line, row in enumerate(given, 1)]
    (tmp_path / "stops.jsonl").write_text("\n".join(lines))
    made = generate(prompts="stops.jsonl")
    for line, (text, reason, ids) in made.items():
        assert text == texts[line][: texts[line].index(stops[line])] and reason == "stop"
        assert ids == plain[line][2][: len(ids)] and len(ids) < len(plain[line][2])
    assert generate("--s-ranks", 2, prompts="stops.jsonl", ranks=3) == made
    assert generate("--layout", "replicas", prompts="stops.jsonl", ranks=2) == made
    shown = generate("--include-stop-str-in-output", prompts="stops.jsonl")
    assert all(text == made[line][0] + stops[line] for line, (text, *_) in shown.items())


def test_flags_change_what_is_generated(plain, generate, hpcdecode):
    token = plain[1][2][0]
    flags = ("--logit-bias", f"{token}:-100", "--bad-words", "the", "--min-tokens", 24, "--frequency-penalty", 0.5)
    made = generate(*flags, "--repetition-penalty", 1.2)
    assert made[1][2][0] != token and all(len(ids) >= 24 for *_, ids in made.values())
    assert " the" in "".join(text for text, *_ in plain.values())
    assert " the " not in "".join(text for text, *_ in made.values())
    wrong = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--min-p", 2)
    assert wrong.returncode == 2 and "--min-p: expected a number in [0, 1], got 2.0" in wrong.stderr


def test_a_truncated_prompt_is_its_last_tokens(generate, tmp_path):
    prompts = [{"prompt_token_ids": list(range(100, 160))}, {"prompt_token_ids": list(range(150, 160))}]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    made = generate("--truncate-prompt-tokens", 10, prompts="long.jsonl")
    assert made[1] == made[2]
