"""Rows that cannot be used, through the command: what is said as they are found, at the end, and before any work."""

from __future__ import annotations

import json
import subprocess

import h5py
import pytest

import hpcdecode as package
from tests.support.commands import TIMEOUT

FLAGS = ("--model", "demo", "--max-tokens", 3)
GOOD = '{"prompt": "The with statement"}\n'
ASKED = '{"question": "What is a class?", "label": "x"}\n'
HINT = "columns: question, label; use --prompt-column question or --prompt-template '...{{ question }}...'"


@pytest.fixture
def generate(hpcdecode, tmp_path):
    def run(content: str, *arguments, name: str = "p.jsonl"):
        (tmp_path / name).write_text(content)
        return hpcdecode("generate", name, *FLAGS, *arguments)

    return run


def piped(hpcdecode, content: str, *arguments):
    """Run with standard input."""
    return subprocess.run(
        hpcdecode.line("generate", "-", *FLAGS, *arguments),
        input=content,
        capture_output=True,
        text=True,
        cwd=hpcdecode.directory,
        env=hpcdecode.environment,
        timeout=TIMEOUT,
    )


def test_the_first_three_are_shown_and_all_are_counted_by_cause(generate):
    bad = [{"prompt": "a", "max_tokens": -n} for n in range(1, 6)] + [{"prompt": ""}] * 2 + [{"prompt": 'x"', "n": "y"}]
    result = generate(GOOD + "".join(json.dumps(row) + "\n" for row in bad))
    assert result.returncode == 3, result.stderr
    said = result.stderr.splitlines()
    for line in (2, 3, 4):
        reason = f"max_tokens: expected an integer >= 1, got {1 - line}"
        assert said.count(f"hpcdecode: row error: line {line}: {reason}") == 1
    assert sum("row error: line" in line for line in said) == 3
    assert sum("more row errors are not shown one by one" in line for line in said) == 1
    at = said.index("row errors by cause:")
    assert [line.split(None, 2) for line in said[at + 1 : at + 5]] == [
        ["rows", "first", "line  cause"],
        ["5", "2", "max_tokens: expected an integer >= 1, got N"],
        ["2", "7", "prompt: expected a string that is not empty, got an empty one"],
        ["1", "9", 'n: expected a 64-bit integer, got a string "..."'],
    ]
    assert said[at + 5] == "results: p.h5 (9 of 9 rows, 8 errors): hpcdecode show p.h5" == said[-1]


def test_files_are_named_and_are_no_part_of_the_cause(hpcdecode, tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(GOOD + '{"prompt": ""}\n')
    result = hpcdecode("generate", "a.jsonl", "b.jsonl", "-o", "o.h5", *FLAGS)
    assert result.returncode == 3
    assert "row error: line 4: b.jsonl:2: prompt: expected a string that" in result.stderr
    assert "\n2     2           prompt: expected a string that is not empty" in result.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_which_none_can_be_used_stop_the_job_before_the_model_loads(hpcdecode, tmp_path, ranks):
    (tmp_path / "p.jsonl").write_text(ASKED * 100 + GOOD)
    result = hpcdecode("generate", "p.jsonl", *FLAGS, ranks=ranks)
    assert (result.returncode, result.stderr.count("hpcdecode: error")) == (2, 1)
    assert "got the first 100 that cannot: line 1: expected exactly one of prompt, " in result.stderr
    assert result.stderr.endswith(f"{HINT}\n") and "layout" not in result.stderr
    assert not (tmp_path / "p.h5").exists()


def test_a_row_among_the_first_hundred_is_enough(generate):
    assert generate(ASKED * 99 + GOOD).returncode == 3
    assert generate(ASKED * 99 + GOOD, "--limit", 99, "--overwrite").returncode == 2
    assert generate(ASKED + GOOD, "--shard", "1/2", "-o", "s.h5").returncode == 2  # the shard has the first row alone


@pytest.mark.parametrize(
    ("row", "flags", "says"),
    [
        ('{"id": 7, "q": 3}', (), "columns: id, q\n"),
        ('{"label": "x", "my text": "y"}', (), "--prompt-column label or"),
        (
            '{"n": 3, "my text": "y"}',
            (),
            "--prompt-column 'my text' or --prompt-template '...{{ row[\"my text\"] }}...'",
        ),
        (ASKED, ("--prompt-column", "questiom"), "questiom: expected the prompt (--prompt-column), got none; " + HINT),
        (ASKED, ("--prompt-template", "{{ q }}"), "'q' is undefined; the row has 'question', 'label'\n"),
        (
            '{"prompt": ""}',
            (),
            "got one that cannot: line 1: prompt: expected a string that is not empty, got an empty",
        ),
        ('{"custom_id": "a", "url": "/v1/x", "body": {}}', (), "url: expected /v1/chat/completions or /v1/completions"),
    ],
)
def test_the_hint_names_columns_that_may_help(generate, row, flags, says):
    result = generate(row.strip() + "\n", *flags)
    assert result.returncode == 2 and says in result.stderr, result.stderr


def test_standard_input_is_looked_at_and_then_read_as_a_whole(hpcdecode, tmp_path):
    refused = piped(hpcdecode, ASKED, "-o", "o.h5")
    assert refused.returncode == 2 and HINT in refused.stderr
    rows = (
        '{"prompt": ""}\n' * 5 + '{"prompt": "The with statement", "id": "x"}\n' * 2 + '{"prompt": "' + "x" * 9 + '"}'
    )
    result = piped(hpcdecode, rows, "-o", "o.h5")
    assert result.returncode == 3, result.stderr
    with package.read(tmp_path / "o.h5") as results:
        assert [row["line"] for row in results] == [6, 7, 8] and len(results.errors()) == 5
    assert result.stderr.count('warning: line 7: id "x" is that of line 6, too') == 1


def test_results_without_rows_are_replaced_by_the_mended_command(generate, tmp_path):
    refused = generate(GOOD.replace("prompt", "x") * 100 + ASKED, "--max-errors", 5)
    assert refused.returncode == 2 and not (tmp_path / "p.h5").exists()
    bad = '{"prompt": "a", "logit_bias": {"999999": 1}}\n' * 3  # which only the tokenizer sees
    failed = generate(bad)
    assert failed.returncode == 3
    again = generate(bad)
    assert again.returncode == 3 and "complete already, 0 rows, 3 errors" in again.stderr
    mended = generate(GOOD)
    assert mended.returncode == 0, mended.stderr
    other = generate(GOOD.replace("with", "for"))
    assert other.returncode == 2 and "holds the rows of another job" in other.stderr
    with h5py.File(tmp_path / "p.h5") as file:
        assert file["rows/line"][:].tolist() == [1] and not len(file["errors/line"])


def test_a_job_that_ended_for_its_errors_is_replaced_too(generate, tmp_path):
    bad = '{"prompt": "a", "logit_bias": {"999999": 1}}\n' * 3
    assert generate(bad, "--max-errors", 1).returncode == 2 and (tmp_path / "p.h5.parts").exists()
    mended = generate(GOOD)
    assert mended.returncode == 0, mended.stderr
    assert not (tmp_path / "p.h5.parts").exists()


def test_columns_that_the_replaced_job_kept_are_no_wish_of_the_mended_one(generate, tmp_path):
    assert generate('{"prompt": "a", "n": 99999, "x": 1}\n' * 2 + '{"x": 2}\n', "--keep-columns", "x").returncode == 2
    assert generate('{"prompt": "a", "logit_bias": {"99999": 1}, "x": 1}\n', "--keep-columns", "x").returncode == 3
    assert generate(GOOD.replace("}", ', "y": 5}')).returncode == 0
    with package.read(tmp_path / "p.h5") as results:
        assert results[1]["y"] == 5
