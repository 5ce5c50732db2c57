"""Texts split into reasoning, content and calls through whole jobs, of texts that a grammar makes the model write."""

from __future__ import annotations

import json

import pytest

import hpcdecode as package
from hpcdecode import LLM, SamplingParams

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'
TEXTS = [
    f"<think>\nWell.\n</think>\n\n{CALL}",
    "<think>\nWell.\n</think>\n\nFour.",
    "Four.",
    "<tool_call>{</tool_call>",
]
FLAGS = ("--model", "demo", "--max-tokens", 100, "--dtype", "float32")
PARSERS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": "A", "content": i, "structured_outputs": {"choice": [text]}} for i, text in enumerate(TEXTS)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "p.jsonl"


def parts(path):
    with package.read(path) as results:
        rows = list(results)
    assert [row["text"] for row in rows] == TEXTS and [row["input.content"] for row in rows] == [0, 1, 2, 3]
    return [(row["reasoning"], row["content"], row["tool_calls"]) for row in rows]


def test_a_job_splits_its_texts(hpcdecode, prompts, tmp_path):
    """In two runs and on two ranks the same, down to the ids; another parser is another job."""
    for name, ranks, *flags in (("one.h5", 1, "--limit", 2), ("one.h5", 1), ("two.h5", 2)):
        result = hpcdecode("generate", prompts, *FLAGS, *PARSERS, "-o", name, *flags, ranks=ranks)
        assert result.returncode == 0, result.stderr
    found = parts(tmp_path / "one.h5")
    assert found == parts(tmp_path / "two.h5")
    assert [row[:2] for row in found] == [("Well.", None), ("Well.", "Four."), (None, "Four."), (None, TEXTS[3])]
    (call,) = found[0][2]
    assert call["function"] == {"name": "f", "arguments": '{"a": [1, 2]}'} and not any(row[2] for row in found[1:])
    again = hpcdecode("generate", prompts, *FLAGS, "-o", "one.h5")
    assert again.returncode == 2 and "reasoning_parser was 'qwen3' and is None" in again.stderr


def test_prompts_on_the_command_line_and_names_that_are_none(hpcdecode):
    schema = ("--structured-outputs", json.dumps({"choice": [TEXTS[1]]}))
    result = hpcdecode("generate", "-p", "A", *FLAGS, *schema, "--reasoning-parser", "deepseek_r1")
    assert result.stdout == "reasoning: Well.\nFour.\n", result.stderr
    auto = hpcdecode("generate", "-p", "A", *FLAGS, *schema, "--reasoning-parser", "auto")
    assert auto.stdout == TEXTS[1] + "\n", auto.stderr  # the model has no chat template
    wrong = hpcdecode("generate", "-p", "A", *FLAGS, "--reasoning-parser", "qwen")
    assert wrong.returncode == 2 and "--reasoning-parser" in wrong.stderr and "qwen3" in wrong.stderr


def test_from_python():
    params = SamplingParams(max_tokens=100, structured_outputs={"choice": [TEXTS[0]]})
    (made,) = LLM("demo", reasoning_parser="qwen3", tool_call_parser="hermes").generate("A", params, use_tqdm=False)
    first = made.outputs[0]
    assert (first.text, first.reasoning, first.content) == (TEXTS[0], "Well.", None)
    assert first.tool_calls[0]["function"]["name"] == "f"
    with pytest.raises(package.errors.UserError, match="--reasoning-parser: expected one of none, auto, deepseek_r1"):
        LLM("demo", reasoning_parser="gpt")


def test_a_budget_of_thought(hpcdecode, tmp_path):
    """The reasoning ends after its tokens, on any number of ranks and beside any other rows."""
    rows = [{"prompt": "The with statement <think>\n"}, {"prompt": "A class"}]
    rows += [{**rows[0], "thinking_token_budget": 5}, {**rows[0], "thinking_token_budget": 0}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "q.jsonl").write_text("\n" * 2 + json.dumps(rows[2]) + "\n")
    flags = (*FLAGS, "--max-tokens", 24, "--ignore-eos")
    for name, source, ranks in (("p.h5", "p.jsonl", 1), ("two.h5", "p.jsonl", 2), ("q.h5", "q.jsonl", 1)):
        result = hpcdecode("generate", source, *flags, "--reasoning-parser", "qwen3", "-o", name, ranks=ranks)
        assert result.returncode == 0, result.stderr
    with package.read(tmp_path / "p.h5") as one, package.read(tmp_path / "two.h5") as two:
        found = list(one)
        assert [r["token_ids"].tolist() for r in found] == [r["token_ids"].tolist() for r in two]
    free, _, bounded, none = found
    assert "</think>" not in free["text"] and free["reasoning"] and not free["content"]
    assert bounded["token_ids"][:5].tolist() == free["token_ids"][:5].tolist()
    before, end, after = bounded["text"].partition("</think>")
    assert before.strip() and end and (bounded["reasoning"], bounded["content"]) == (before.strip(), after.lstrip())
    assert none["text"].startswith("</think>") and not none["reasoning"] and none["content"]
    with package.read(tmp_path / "q.h5") as alone:
        assert alone[3]["token_ids"].tolist() == bounded["token_ids"].tolist()
    without = hpcdecode("generate", "q.jsonl", *flags, "-o", "w.h5")
    assert without.returncode == 3 and "thinking_token_budget: expected --reasoning-parser" in without.stderr
    flag = hpcdecode("generate", "q.jsonl", *flags, "--thinking-token-budget", 3, "-o", "w2.h5")
    assert flag.returncode == 2 and "--thinking-token-budget: expected --reasoning-parser" in flag.stderr
