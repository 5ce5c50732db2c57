"""Prompts on the command line, and prompts made of columns: through the command, into its output and its results."""

from __future__ import annotations

import json
import shutil

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hpcdecode as package

FLAGS = ("--model", "demo", "--max-tokens", 6)


@pytest.fixture
def demo(hpcdecode):
    def run(*arguments):
        return hpcdecode("generate", *FLAGS, *arguments)

    return run


def texts(path) -> list[str]:
    with package.read(path) as results:
        return [row["text"] for row in results]


def test_prompts_on_the_command_line_are_answered_on_standard_output(demo, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "The with statement"}\n{"prompt": "A class\\nis 50%, a.h5"}\n')
    assert demo("p.jsonl").returncode == 0
    wanted = texts(tmp_path / "p.h5")
    before = sorted(tmp_path.iterdir())
    result = demo("-p", "The with statement", "--prompt", "A class\nis 50%, a.h5")
    assert (result.returncode, result.stdout) == (0, "\n\n".join(wanted) + "\n"), result.stderr
    assert not result.stderr and sorted(tmp_path.iterdir()) == before
    kept = demo("-p", "The with statement", "-o", "one.h5")
    assert kept.stdout == wanted[0] + "\n" and "one.h5" in kept.stderr and texts(tmp_path / "one.h5") == wanted[:1]


def test_a_prompt_that_cannot_be_used(demo):
    result = demo("-p", "", "-p", "A class")
    assert result.returncode == 3 and result.stdout.count("\n") >= 1
    assert (
        result.stderr == "hpcdecode: error: prompt 1: prompt: expected a string that is not empty, got an empty one\n"
    )


def test_prompts_and_files_are_not_both(demo):
    result = demo("-p", "A", "p.jsonl")
    assert result.returncode == 2 and "expected prompts by -p or prompt files, got both" in result.stderr


def test_prompts_are_made_of_columns(demo, tmp_path):
    """Of JSON, Parquet and HDF5, by a flag, a file and a job file: all the same; another template is another job."""
    rows = [{"a": "with", "b c": 1, "id": "x"}, {"a": "class", "b c": 2, "id": "y"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"The {r['a']} {r['b c']}"}) + "\n" for r in rows))
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{**row, "d": 0} for row in rows]), tmp_path / "q.parquet")
    template = 'The {{ a }} {{ row["b c"] }}'
    (tmp_path / "template.txt").write_text(template + "\n")
    (tmp_path / "job.toml").write_text('prompts = ["q.jsonl"]\nprompt_template = "template.txt"\noutput = "job.h5"\n')
    assert demo("p.jsonl").returncode == 0
    wanted = texts(tmp_path / "p.h5")
    for arguments, output in (
        (("q.jsonl", "--prompt-template", template), "q.h5"),
        (("q.parquet", "--prompt-template", "template.txt", "-o", "t.h5"), "t.h5"),
        (("--job", "job.toml"), "job.h5"),
    ):
        result = demo(*arguments)
        assert result.returncode == 0, result.stderr
        assert texts(tmp_path / output) == wanted
    again = demo("q.jsonl", "--prompt-template", "The {{ a }}", "-o", "q.h5")
    assert again.returncode == 2 and "prompt_template was" in again.stderr


def test_what_does_not_go_together_is_said_before_anything_is_loaded(demo, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"a": 1}\n')
    for arguments, reason in (
        (("--prompt-template", "{{ a }"), "--prompt-template: expected a template in jinja2's language"),
        (("--prompt-template", "x", "--prompt-column", "a"), "expected one of --prompt-column and --prompt-template"),
        (("--prompt-template", "x", "--messages-template", "y"), "expected one of --prompt-template and --messages"),
    ):
        result = demo("p.jsonl", *arguments)
        assert result.returncode == 2 and reason in result.stderr and "layout" not in result.stderr


def test_sampling_parameters_of_the_model(hpcdecode, checkpoint, tmp_path):
    model = shutil.copytree(checkpoint("llama2"), tmp_path / "model")
    stated = json.loads((model / "generation_config.json").read_text())
    own = {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.2}
    (model / "generation_config.json").write_text(json.dumps({**stated, **own}))
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6, 7]}\n')

    def sampling(*flags) -> tuple[dict, str]:
        result = hpcdecode("generate", "p.jsonl", "--model", model, "--max-tokens", 2, "--overwrite", *flags)
        assert result.returncode == 0, result.stderr
        with h5py.File(tmp_path / "p.h5") as file:
            return json.loads(file.attrs["job"])["params"], result.stderr

    params, said = sampling("--generation-config", "auto", "--top-k", 7)
    assert (params["temperature"], params["top_k"], params["repetition_penalty"]) == (0.5, 7, 1.2)
    assert "generation_config.json: temperature 0.5, repetition_penalty 1.2" in said
    assert sampling()[0]["temperature"] == 0
    (model / "generation_config.json").write_text(json.dumps({**stated, **own, "do_sample": False}))
    params, said = sampling("--generation-config", "auto")
    assert (params["temperature"], params["repetition_penalty"]) == (0, 1.2)
    (model / "generation_config.json").write_text(json.dumps({**stated, "temperature": "hot"}))
    result = hpcdecode("generate", "p.jsonl", "--model", model, "--generation-config", "auto", "--overwrite")
    assert result.returncode == 2 and "generation_config.json: temperature: expected a number" in result.stderr


def test_a_model_that_cannot_be_fetched(hpcdecode, tmp_path):
    hpcdecode.environment |= {"HPCDECODE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    result = hpcdecode("generate", "-p", "A", "--model", "smollm2", ranks=2)
    assert result.returncode == 2 and result.stderr.count("use --model demo, which needs none") == 1, result.stderr
