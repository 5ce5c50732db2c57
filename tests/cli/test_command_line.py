"""A wrong command line is one line on standard error that says what was expected; near misses are named or taken."""

from __future__ import annotations

import re

import pytest

from hpcdecode import cli

DTYPES = "expected one of float32, bfloat16, auto; got"
WRONG = {
    "generatt": "hpcdecode: error: expected a subcommand, one of .*; got 'generatt'; did you mean generate[?]",
    "": "hpcdecode: error: expected a subcommand, got none",
    "generate --temprature 1 p": "expected a known flag, got --temprature; did you mean --temperature[?]",
    "generate --tempra=1 p": "expected a known flag, got --tempra; did you mean --temperature[?]",
    "generate --max 1 p": "--max: expected one flag, got the beginning of --max-errors, .*--max-tokens",
    "generate --max-tokens x p": "--max-tokens: expected an integer, got 'x'",
    "generate --temperature x p": "--temperature: expected a number, got 'x'",
    "generate --max-tokens": "--max-tokens: expected a value, got none",
    "generate --overwrite=1 p": "--overwrite: expected no value, got '1'",
    "generate --dtype half p": f"--dtype: {DTYPES} 'half'",
    "generate --kv-dtype int9 p": "--kv-dtype.*: expected one of .*; got 'int9'; did you mean int8[?]",
    "generate --batch q p": "--batch.*: expected a number or auto, got 'q'",
    "generate --logit-bias 1 p": "--logit-bias: expected ID:X with commas between them, such as .*, got '1'",
    "generate --stop-token-ids a p": "--stop-token-ids: expected token ids with commas between them, .*, got 'a'",
    "generate --structured-outputs [1] p": "--structured-outputs: expected a JSON object or a file of one: ",
    "generate -q -v p": "-v/--verbose: expected to be alone, got -q/--quiet too",
    "export": "export: error: expected OUT.h5, got none",
    "doctor x": "doctor: error: expected no further argument, got 'x'",
    "plan --model m x.jsonl": (
        "plan: error: expected no further argument, got 'x.jsonl'; did you mean --prompts x.jsonl?"
    ),
    "bench productz": "expected one of .*; got 'productz'; did you mean products[?]",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_said_in_one_line(line, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(line.split(), speak=True)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and said.endswith(" (--help lists all)\n")
    assert re.search(WRONG[line], said), said
    assert "_" not in said.replace("prompt_", "")


def test_settings_in_json_are_named_as_there(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["generate", "p", "--speculative-config", '{"num_speculative_token": 3}'], speak=True)
    said = capsys.readouterr().err
    assert "--speculative-config: expected a JSON object with some of method, num_speculative_tokens, " in said


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--max_tokens 3", "max_tokens", 3),
        ("--max_tokens=3", "max_tokens", 3),
        ("--max-tok 3", "max_tokens", 3),
        ("--max-num-seqs 8", "batch", 8),
        ("--max-num-batched-tokens 64", "prefill_tokens", 64),
        ("--kv-cache-dtype int8", "kv_dtype", "int8"),
        ("--kv-cache-dtype bf16", "kv_dtype", "bfloat16"),
        ("--kv-dtype half", "kv_dtype", "float16"),
        ("--kv-cache-dtype auto", "kv_dtype", None),
        ("--mamba-ssm-cache-dtype bf16", "mamba_ssm_cache_dtype", "bfloat16"),
        ("--mamba-ssm-cache-dtype auto", "mamba_ssm_cache_dtype", None),
        ("--tensor-parallel-size 2", "tp", 2),
        ("--dtype bf16", "dtype", "bfloat16"),
        ("--dtype fp32", "dtype", "float32"),
        ("--dtype auto", "dtype", None),
        ("--batch auto", "batch", None),
        ("--no_prefix_sharing", "prefix_sharing", False),
        ("--stop=--a_b", "stop", ["--a_b"]),
    ],
)
def test_other_spellings_and_names_of_flags(line, name, value):
    options = vars(cli.parse(["generate", "p.jsonl", *line.split()], speak=True))
    assert options[name] == value and options["prompts"] == ["p.jsonl"]


def test_a_rank_that_does_not_speak_for_all_says_nothing(capsys):
    assert cli.parse(["generatt"], speak=False) is None
    assert capsys.readouterr() == ("", "")


def test_a_key_of_a_job_file_that_is_not_known(hpcdecode, tmp_path):
    (tmp_path / "job.toml").write_text('prompts = ["p.jsonl"]\nmax_token = 3\n')
    result = hpcdecode("generate", "--job", "job.toml")
    assert result.returncode == 2 and "got max_token; did you mean max_tokens?" in result.stderr
