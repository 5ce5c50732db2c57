"""Where the model comes from, and what a job refuses."""

from __future__ import annotations

import pytest

from hpcdecode.cli.default_output import default_output
from hpcdecode.config import Job
from hpcdecode.errors import UserError
from hpcdecode.requests.shard import Shard
from hpcdecode.system.model_path import demo_directory, find_model


def test_the_flag_wins_over_the_environment_over_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpcdecode.toml").write_text('model = "/of/settings"\n')
    assert find_model("/of/flag", {"HPCDECODE_MODEL": "/of/environment"}) == "/of/flag"
    assert find_model(None, {"HPCDECODE_MODEL": "/of/environment"}) == "/of/environment"
    assert find_model(None, {}) == "/of/settings"
    assert find_model("demo", {}) == str(demo_directory() / "model")


@pytest.mark.parametrize("settings", [None, "", "model = 7", "model ="])
def test_no_model_is_an_error(tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    if settings is not None:
        (tmp_path / "hpcdecode.toml").write_text(settings)
    with pytest.raises(UserError, match=r"hpcdecode\.toml"):
        find_model(None, {})


def test_the_output_is_named_after_the_prompts():
    assert default_output(["/data/prompts.jsonl.gz"]) == "prompts.h5"
    assert default_output(["prompts.jsonl"], Shard(0, 4)) == "prompts.0-of-4.h5"


def test_compiled_slices_are_not_eager():
    job = Job(model="m", prompts=("p",), output="o", compile=True, enforce_eager=True)
    with pytest.raises(UserError, match="--compile: expected it without --enforce-eager, got both"):
        job.check()


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1", "a/b", "1/4/2", "0/0", ""])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="expected I/N with 0 <= I < N"):
        Shard.parse(text)


@pytest.mark.parametrize("field", ["batch", "period", "lanes", "prefill_tokens", "kv_memory"])
def test_sizes_are_at_least_one(field):
    with pytest.raises(UserError, match=field.replace("_", "-")):
        Job(prompts=("p",), model="m", output="o", **{field: 0}).check()
