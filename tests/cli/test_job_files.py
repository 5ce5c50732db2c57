"""Job files: values under the flags, paths from the file's folder, and what is wrong said with what is known."""

from __future__ import annotations

import json

import h5py
import msgspec
import pytest

from hpcdecode.cli.job_file import read_job_file
from hpcdecode.config import Job
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.system.model_path import SETTINGS, read_toml
from tests.support.commands import ROOT

EXAMPLE = ROOT / "jobs" / "demo.toml"


def job_of(path):
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        return json.loads(file.attrs["job"]), len(file["rows/line"])


def test_the_example_runs_and_flags_win_over_it(hpcdecode, tmp_path):
    result = hpcdecode("generate", "--job", EXAMPLE, "--max-tokens", 4, "--limit", 6, "--stop", "x")
    assert result.returncode == 0, result.stderr
    job, rows = job_of(tmp_path / "prompts.h5")
    params = msgspec.to_builtins(SamplingParams(max_tokens=4, stop=("x",)))
    assert (rows, job["dtype"], job["kv_memory"]) == (6, "float32", 64 << 20)
    assert job["params"] == json.loads(json.dumps(params))
    assert job["prompts"] == [str(ROOT / "jobs" / "demo/prompts.jsonl")]


def test_every_key_of_a_job_file_is_a_flag(hpcdecode):
    flags = hpcdecode("generate", "--help").stdout
    names = {*Job.__struct_fields__, *SamplingParams.__struct_fields__, "fail_fast"}
    names -= {"params", "prompts", "score", "adapters", "choose_schedule"}
    assert all(f"--{name.replace('_', '-')}" in flags for name in names)
    assert f"({SamplingParams().max_tokens})" in flags and "(5.0)" in flags


@pytest.fixture
def job_file(tmp_path):
    def write(text):
        (tmp_path / "x.toml").write_text(text)
        return str(tmp_path / "x.toml")

    return write


def test_names_of_models_stay_names(job_file, tmp_path, monkeypatch):
    """In a folder other than the working directory."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--org--name" / "snapshots").mkdir(parents=True)
    for name in ("demo", "smollm2", "org/name", "org/name@v2"):
        values = read_job_file(job_file(f'model = "{name}"\n[speculative_config]\nmodel = "{name}"'))
        assert values["model"] == values["speculative_config"].model == name
    (tmp_path / "org/name").mkdir(parents=True)
    assert read_job_file(job_file('model = "org/name"'))["model"] == str(tmp_path / "org/name")
    assert read_job_file(job_file('model = "org/other"'))["model"] == str(tmp_path / "org/other")


def test_values_and_paths(job_file, tmp_path):
    text = """
        prompts = ["a.jsonl", "/b/*.jsonl", "-"]
        model = "models/m"
        lora = "adapter"
        output = "out/o.h5"
        temperature = 1
        stop = "end"
        stop_token_ids = [3, 4]
        logit_bias = { "7" = -1 }
        kv_memory = 4096
        kv_swap = ["host:1G", "nvme:/scratch:1T"]
        fail_fast = true
        overwrite = true
    """
    assert read_job_file(job_file(text)) == {
        "prompts": (str(tmp_path / "a.jsonl"), "/b/*.jsonl", "-"),
        "model": str(tmp_path / "models/m"),
        "lora": str(tmp_path / "adapter"),
        "output": str(tmp_path / "out/o.h5"),
        "temperature": 1.0,
        "stop": ("end",),
        "stop_token_ids": (3, 4),
        "logit_bias": {7: -1.0},
        "kv_memory": 4096,
        "kv_swap": ("host:1G", "nvme:/scratch:1T"),
        "max_errors": 0,
        "overwrite": True,
    }
    second = read_job_file(job_file('[speculative_config]\nmodel = "models/n"'))["speculative_config"]
    assert (second.method, second.model) == ("draft_model", str(tmp_path / "models/n"))
    guessed = read_job_file(job_file("[speculative_config]\nnum_speculative_tokens = 3"))
    assert guessed == {"speculative_config": SpeculativeConfig(num_speculative_tokens=3)}
    assert read_job_file(job_file("speculative_config = '{}'"))["speculative_config"] == SpeculativeConfig()
    assert read_job_file(job_file('[lora]\nsql = "a/b"\nx = "/c"')) == {
        "adapters": {"sql": str(tmp_path / "a/b"), "x": "/c"}
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_token = 3", r"expected keys among activations, .*; got max_token; did you mean max_tokens[?]"),
        ("[sampling]\nseed = 3", "got sampling"),
        ('max_tokens = "3"', 'max_tokens: expected a 64-bit integer, got a string "3"'),
        ("batch = true", "batch: expected a 64-bit integer, got a boolean true"),
        ("model = 3", "model: expected a string, got an integer 3"),
        ("[lora]\na = 3", "lora.a: expected a string, got an integer 3"),
        ("prompts = [1]", r"prompts\[0\]: expected a string"),
        ("seed = 1979-05-27", "seed: expected a 64-bit integer, got a date"),
        ('kv_memory = "lots"', "kv_memory: expected a size such as 512M"),
        ('shard = "4/4"', "shard: expected I/N"),
        ("speculative_config = 3", "speculative_config: expected an object, got an integer 3"),
        ("[speculative_config]\nmodel = 3", "speculative_config: expected a JSON object with some of method"),
        ("shard = 4", "shard: expected a string"),
        ("seed = ", "expected a readable TOML file"),
    ],
)
def test_what_is_wrong(job_file, text, expected):
    with pytest.raises(UserError, match=expected):
        read_job_file(job_file(text))


def test_a_missing_file_ends_the_command(hpcdecode):
    result = hpcdecode("generate", "--job", "none.toml")
    assert result.returncode == 2 and "none.toml" in result.stderr and "Traceback" not in result.stderr


def test_token_ids_outside_the_vocabulary_end_the_job_before_it_begins(hpcdecode, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 3)
    for flags in (("--stop-token-ids", "5,70000"), ("--logit-bias", "70000:1")):
        result = hpcdecode("generate", "p.jsonl", "--model", "demo", *flags)
        assert result.returncode == 2, result.stderr
        assert f"{flags[0]}: expected token ids in [0, 2048), got 70000" in result.stderr
        assert not (tmp_path / "p.h5").exists()


def test_settings_that_are_no_toml_are_named(tmp_path):
    (tmp_path / SETTINGS).write_bytes(b"\xff")
    with pytest.raises(UserError, match=SETTINGS):
        read_toml(str(tmp_path / SETTINGS))
