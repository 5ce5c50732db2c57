"""`generate --speculative-config`: the results of a job without it, over ranks and after an interruption."""

from __future__ import annotations

import json

import h5py
import pytest

from tests.support.commands import run
from tests.support.worlds import contents

FLAGS = ("--model", "demo", "--dtype", "float32", "--kv-memory", "64M", "--max-tokens", 48, "--logprobs", 0)
GUESSES = ("--speculative-config", '{"num_speculative_tokens": 6}')
OF_A_MODEL = (
    "--speculative-config",
    '{"method": "draft_model", "model": "demo", "quantization": "int4", "num_speculative_tokens": 4}',
)


@pytest.fixture
def plain(hpcdecode):
    texts = [
        "def f(x):\n    return x\n\n\ndef g(x):\n    return x\n\n\n",
        "a b a b a b",
        "import os\nimport sys\nimport ",
    ]
    rows = [{"prompt": texts[line % 3], "temperature": line % 2 / 2, "seed": line} for line in range(24)]
    (hpcdecode.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = hpcdecode("generate", "rows.jsonl", "-o", "plain.h5", *FLAGS)
    assert result.returncode == 0 and "guessed" not in result.stderr
    return columns(hpcdecode.directory / "plain.h5")


def columns(path):
    with h5py.File(path) as file:
        return str({name: data[:].tolist() for name, data in file["rows"].items() if not name.endswith("_at")})


WHERE = {
    "one process": (1, ()),
    "split": (4, ("--layout", "split", "--s-ranks", 1, "--batch", 6, "--admission", "optimistic")),
    "members": (2, ("--tp", 2, "--batch", 6)),
    "prefill ranks": (3, ("--s-ranks", 1, "--prefill-ranks", 1, "--batch", 6)),
}


def ways():
    """Each way in two places; with `full` in all."""
    some = (("one process", "looked up"), ("members", "looked up"), ("split", "by a model"), ("members", "by a model"))
    for how, guesses in (("looked up", GUESSES), ("by a model", OF_A_MODEL)):
        for where in WHERE:
            marks = () if (where, how) in some else pytest.mark.full
            yield pytest.param(where, guesses, id=f"{where}-{how}", marks=marks)


@pytest.mark.parametrize(("where", "guesses"), list(ways()))
def test_rows_are_those_of_a_job_without_guesses(hpcdecode, plain, where, guesses):
    ranks, flags = WHERE[where]
    job = ("generate", "rows.jsonl", "-o", "out.h5", *FLAGS, *guesses, *flags)
    line = hpcdecode.line(*job, ranks=ranks, module="tests.support.guessing")  # whatever steps take here
    result = run(line, cwd=hpcdecode.directory, env=hpcdecode.environment)
    assert result.returncode == 0, result.stderr
    summary = contents(hpcdecode.directory / "out.h5")[-1]
    assert 0 < summary["confirmed_tokens"] < summary["drafted_tokens"]
    assert f"guessed {summary['drafted_tokens']:,} tokens ahead, {summary['confirmed_tokens']:,} of them right" in (
        result.stderr
    )
    if "--tp" in flags:  # members add up in another order than one process
        assert (
            hpcdecode("generate", "rows.jsonl", "-o", "plain.h5", *FLAGS, *flags, "--overwrite", ranks=ranks).returncode
            == 0
        )
        plain = columns(hpcdecode.directory / "plain.h5")
    assert columns(hpcdecode.directory / "out.h5") == plain


def test_a_job_goes_on_with_guesses_and_without(hpcdecode, plain):
    job = ("generate", "rows.jsonl", "-o", "out.h5", *FLAGS)
    for limit, flags in ((8, GUESSES), (16, ()), (24, GUESSES)):
        result = hpcdecode(*job, *flags, "--limit", limit)
        assert result.returncode == 0, result.stderr
    assert columns(hpcdecode.directory / "out.h5") == plain
