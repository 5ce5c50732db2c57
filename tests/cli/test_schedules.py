"""`generate --schedule`: the load that a job reports."""

from __future__ import annotations

import json

from tests.support.worlds import contents

B, F, S, PROMPT = 16, 8, 32, 1
LEVEL = B * (PROMPT + (S + F) // 2)  # tokens, in the steady state's peak


def run(hpcdecode, *flags):
    rows = ({"prompt_token_ids": [5 + i % 50] * PROMPT} for i in range(3 * B))
    (hpcdecode.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ("--batch", B, "--period", F, "--max-tokens", S + 1, "--ignore-eos", "--lanes", 1, "--overwrite")
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", "--model", "demo", *sizes, *flags)
    assert result.returncode == 0, result.stderr
    return result.stderr, *contents(hpcdecode.directory / "out.h5")


def test_the_peak_load_of_fixed_f_is_that_of_the_formula_and_no_schedule_changes_tokens(hpcdecode):
    _, rows, _, summary = run(hpcdecode, "--schedule", "fixed-f")
    assert summary["peak_load_tokens"] == LEVEL
    said, controlled, _, summary = run(hpcdecode, "--schedule", "load-control", "--load-limit", 250)
    assert "schedule load-control up to 250 tokens a step" in said
    assert 200 < summary["peak_load_tokens"] <= 250
    _, static, _, summary = run(hpcdecode, "--schedule", "static")
    assert summary["peak_load_tokens"] == B * (PROMPT + S)
    assert rows == controlled == static
