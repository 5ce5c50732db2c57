"""What a wrong command line or a broken file says, and that nothing hangs."""

from __future__ import annotations

import json
import shutil

import h5py
import pytest
import torch


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    return path


@pytest.fixture
def model(checkpoint, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(checkpoint("llama2"), tmp_path / "model")


def refused(result, *expected):
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for text in expected:
        assert text in result.stderr
    return result.stderr


def test_no_model_says_where_it_can_come_from(hpcdecode, prompts):
    refused(hpcdecode("generate", prompts), "--model", "HPCDECODE_MODEL", "hpcdecode.toml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flag", ["--device", "--r-device"])
def test_a_gpu_that_is_not_there(hpcdecode, prompts, model, flag):
    refused(hpcdecode("generate", prompts, "--model", model, flag, "cuda"), f"{flag} cuda", "sees no GPU", "leave")


def test_missing_model_files(hpcdecode, prompts, model):
    refused(hpcdecode("generate", prompts, "--model", model / "none"), "none")
    (model / "config.json").unlink()
    refused(hpcdecode("generate", prompts, "--model", model), "config.json")


def test_truncated_weights(hpcdecode, prompts, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(hpcdecode("generate", prompts, "--model", model), "model.safetensors")


def test_missing_weights(hpcdecode, prompts, model):
    (model / "model.safetensors").unlink()
    refused(hpcdecode("generate", prompts, "--model", model), "safetensors")


def test_missing_tokenizer(hpcdecode, prompts, model):
    for path in model.glob("token*"):
        path.unlink()
    refused(hpcdecode("generate", prompts, "--model", model), "tokenizer")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top-p"),
        (["--batch", "0"], "--batch"),
        (["--lanes", "x"], "--lanes"),
        (["--kv-dtype", "int3"], "--kv-dtype"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--s-ranks", "2"], "--s-ranks"),
        (["--enable-expert-parallel"], "--ep: expected a model with layers of experts"),
        (["--kv-memory", "lots"], "--kv-memory"),
    ],
)
def test_flag_values(hpcdecode, prompts, checkpoint, flags, expected):
    refused(hpcdecode("generate", prompts, "--model", checkpoint("llama2"), *flags), expected)


def test_missing_prompt_file(hpcdecode, checkpoint, tmp_path):
    refused(hpcdecode("generate", tmp_path / "none.jsonl", "--model", checkpoint("llama2")), "none.jsonl")


def test_output_exists(hpcdecode, prompts, checkpoint, tmp_path):
    (tmp_path / "out.h5").write_bytes(b"")
    refused(hpcdecode("generate", prompts, "--model", checkpoint("llama2"), "-o", "out.h5"), "out.h5", "--overwrite")


def test_a_kv_memory_too_small_for_anything(hpcdecode, prompts, checkpoint):
    refused(hpcdecode("generate", prompts, "--model", checkpoint("llama2"), "--kv-memory", "10"), "--kv-memory")


def test_a_world_without_r_rank_says_so_once(hpcdecode, prompts, checkpoint):
    result = hpcdecode("generate", prompts, "--model", checkpoint("llama2"), "--s-ranks", "2", ranks=2)
    assert refused(result, "no R-rank").count("no R-rank") == 1


def test_an_error_on_one_rank_ends_all(hpcdecode, prompts, model):
    (model / "model.safetensors").unlink()
    result = hpcdecode("generate", prompts, "--model", model, ranks=3, timeout=120)
    assert refused(result, "safetensors").count("hpcdecode: error") == 1


def test_bad_rows_are_recorded_and_the_others_done(hpcdecode, checkpoint, tmp_path):
    lines = [
        '{"prompt_token_ids": [5, 6, 7], "id": "good"}',
        "{not json",
        '{"prompt": ""}',
        '{"prompt": 7, "id": "seven"}',
        '{"prompt_token_ids": [5, 6], "max_tokens": "many"}',
        json.dumps({"prompt_token_ids": [5] * 5000}),
        '{"prompt_token_ids": [1000000]}',
        '{"id": "nothing"}',
        "[1, 2]",
        '{"prompt_token_ids": [8], "custom_id": "also good", "max_tokens": 3}',
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    flags = ("--max-tokens", 5, "--ignore-eos", "--dtype", "float32")
    result = hpcdecode("generate", "prompts.jsonl", "--model", checkpoint("llama2"), *flags)
    assert result.returncode == 3, result.stderr
    again = hpcdecode("generate", "prompts.jsonl", "--model", checkpoint("llama2"), *flags)
    assert (again.returncode, again.stderr.strip()) == (
        3,
        "prompts.h5: complete already, 2 rows, 8 errors: hpcdecode show prompts.h5",
    )
    with h5py.File(tmp_path / "prompts.h5") as file:
        assert file["rows/line"][:].tolist() == [1, 10]
        assert list(file["rows/id"].asstr()[:]) == ["good", "also good"]
        assert file["rows/token_offsets"][:].tolist() == [0, 5, 8]
        assert file["errors/line"][:].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
        assert file["errors/id"].asstr()[2] == "seven"
        assert all(file["errors/reason"].asstr()[:])
        assert json.loads(file.attrs["summary"])["errors"] == 8
