"""Ranks that only prefill: rows of every kind end as in one process; drained and killed."""

from __future__ import annotations

import json
import random
import signal

import pytest

from tests.support.commands import Command, rank_of
from tests.support.long_jobs import end, finished, wait_for_rows
from tests.support.worlds import contents

DEMO = ("--model", "demo", "--dtype", "float32", "--batch", 8)
COMMON = "The quick brown fox jumps over the lazy dog. " * 12
KINDS = (
    {},
    {"temperature": 0.9, "n": 3, "seed": 1},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"beam_width": 3},
    {"stop": ["the"], "presence_penalty": 0.5},
    {"max_tokens": 1},
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of rows of all kinds, some of which begin alike."""
    draw = random.Random(3)
    each = []
    for i in range(49):
        prompt = COMMON * (i % 3 == 0) + f"Row {i}: " + "word " * draw.randint(1, 90)
        each.append({"prompt": prompt, "max_tokens": draw.randint(1, 24), **KINDS[i % len(KINDS)]})
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in each))
    return path


@pytest.fixture(scope="module")
def expected(rows, forkserver):
    """What one process makes of them."""
    result = Command(rows.parent, forkserver)("generate", rows, "-o", "one.h5", *DEMO)
    assert result.returncode == 0, result.stderr
    return contents(rows.parent / "one.h5")[0]


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (3, ("--prefill-ranks", 1), "layout: 1 S + 1 prefill + 1 R"),
        (5, ("--s-ranks", 2, "--prefill-ranks", 2, "--schedule", "fifo"), "layout: 2 S + 2 prefill + 1 R"),
        (4, ("--prefill-ranks", 2, "--admission", "optimistic"), "layout: 1 S + 2 prefill + 1 R"),
    ],
)
def test_rows_of_every_kind_end_as_in_one_process(hpcdecode, tmp_path, rows, expected, ranks, flags, said):
    result = hpcdecode("generate", rows, "-o", "out.h5", *DEMO, *flags, ranks=ranks)
    assert result.returncode == 0 and said in result.stderr, result.stderr
    found, topology, _ = contents(tmp_path / "out.h5")
    assert repr(found) == repr(expected) and len(topology) == ranks  # some log-probabilities are no numbers


def test_scores(hpcdecode, tmp_path):
    lines = [{"prompt": COMMON + str(i), "continuations": [" a dog", " the cat runs", " x"]} for i in range(12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, world, more in (("one.h5", 1, ()), ("prefill.h5", 3, ("--prefill-ranks", 1))):
        result = hpcdecode("score", "in.jsonl", "-o", name, "--model", "demo", "--dtype", "float32", *more, ranks=world)
        assert result.returncode == 0, result.stderr
    assert repr(contents(tmp_path / "one.h5")[0]) == repr(contents(tmp_path / "prefill.h5")[0])


def test_it_goes_on_after_another_layout_and_a_signal_drains_it(hpcdecode, long_job, tmp_path):
    before = {}
    for flags, ranks in (((), 2), (("--prefill-ranks", 1), 3)):
        process = hpcdecode.start(*long_job, *flags, ranks=ranks)
        wait_for_rows(tmp_path / "out.h5", process, more_than=len(before))
        rank_of(process, 0).send_signal(signal.SIGTERM)
        code, err = end(process, 60)
        assert code == 128 + signal.SIGTERM and "the same command goes on" in err, err
        after, complete = finished(tmp_path / "out.h5")
        assert len(after) > len(before) and all(after[line] == tokens for line, tokens in before.items())
        assert not complete
        before = after


def test_one_that_is_killed_ends_the_others(hpcdecode, long_job, tmp_path):
    process = hpcdecode.start(*long_job, "--prefill-ranks", 1, ranks=3)
    wait_for_rows(tmp_path / "out.h5", process)
    rank_of(process, 1).kill()
    code, _ = end(process, 20)
    rows, complete = finished(tmp_path / "out.h5")
    assert code != 0 and rows and not complete
