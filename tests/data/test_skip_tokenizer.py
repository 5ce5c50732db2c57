"""Models without a tokenizer: token ids in, token ids out."""

from __future__ import annotations

import json
import shutil

import pytest

import hpcdecode as package
from hpcdecode import LLM, PromptError, SamplingParams
from hpcdecode.errors import UserError

SKIP = "--skip-tokenizer-init"


@pytest.fixture
def bare(checkpoint, tmp_path):
    """A model's directory without the files of its tokenizer."""
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint("llama3"), folder)
    for file in folder.glob("*token*"):
        file.unlink()
    return folder


def tokens(path):
    with package.read(path) as results:
        return {row["id"]: (list(row["token_ids"]), row["text"], row["finish_reason"]) for row in results}


def test_a_job_of_token_ids_gives_the_tokens_that_it_gives_with_a_tokenizer(hpcdecode, bare, checkpoint, tmp_path):
    rows = [{"id": str(i), "prompt_token_ids": [5 + i, 7, 9, 11 * (i + 1)], "max_tokens": 9} for i in range(4)]
    rows[2] |= {"temperature": 1.0, "seed": 3, "stop_token_ids": list(range(100, 400)), "logprobs": 2}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for model, out, flags in ((checkpoint("llama3"), "with.h5", ()), (bare, "without.h5", (SKIP,))):
        result = hpcdecode("generate", "rows.jsonl", "--model", model, "-o", out, *flags)
        assert result.returncode == 0, result.stderr
    whole, found = tokens(tmp_path / "with.h5"), tokens(tmp_path / "without.h5")
    assert len(found) == 4 and found["2"][2] == "stop"
    assert {i: (ids, "", reason) for i, (ids, _, reason) in whole.items()} == found
    result = hpcdecode("generate", "rows.jsonl", "--model", bare, "-o", "without.h5")
    assert result.returncode == 2 and "skip_tokenizer_init was True and is None" in result.stderr
    result = hpcdecode("generate", "rows.jsonl", "--model", bare, "-o", "again.h5")
    assert result.returncode == 2 and "expected tokenizer.json" in result.stderr
    assert "--skip-tokenizer-init" in result.stderr
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a text"}\n' * 3)
    result = hpcdecode("generate", "texts.jsonl", "--model", bare, SKIP)
    assert result.returncode == 2 and not (tmp_path / "texts.h5").exists()
    assert "3 that cannot: line 1: expected prompt_token_ids, as there is no tokenizer" in result.stderr
    result = hpcdecode("export", "without.h5", "--to", "jsonl")
    assert result.returncode == 0, result.stderr


def test_what_needs_text_is_refused_row_by_row(bare):
    llm = LLM(bare, dtype="float32", kv_memory="16M", skip_tokenizer_init=True)
    ids = [5, 6, 7]
    (output,) = llm.generate(ids, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
    refused = {
        "expected prompt_token_ids, as there is no tokenizer": ("some text", {}),
        "stop: expected no texts, by --skip-tokenizer-init; use stop_token_ids": (ids, {"stop": ["a"]}),
        "bad_words": (ids, {"bad_words": ["word"]}),
        "structured_outputs": (ids, {"structured_outputs": {"regex": "a+"}}),
    }
    for reason, (prompt, params) in refused.items():
        with pytest.raises(PromptError, match=reason):
            llm.generate(prompt, SamplingParams(max_tokens=3, **params), use_tqdm=False)
    with pytest.raises(PromptError, match="messages: expected a model with a chat template"):
        llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)
    with pytest.raises(UserError, match="got skip_tokenizer_init"):
        llm.get_tokenizer()
    with pytest.raises(UserError, match="--skip-tokenizer-init: expected no --reasoning-parser"):
        LLM(bare, skip_tokenizer_init=True, reasoning_parser="qwen3")
