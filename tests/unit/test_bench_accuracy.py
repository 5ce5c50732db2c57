"""What the KV data types cost on the demo model, within the bounds that docs/performance.md states."""

import json

import pytest

from hpcdecode.errors import UserError
from hpcdecode.perf.bench import main

# Most change of perplexity, and most error of the logits as a share of their standard deviation.
BOUNDS = {"float16": (1e-3, 1e-3), "bfloat16": (3e-3, 1e-2), "int8": (5e-3, 2e-2), "int4": (5e-2, 0.25)}


@pytest.fixture(scope="module")
def cases():
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main("accuracy", ["--json", "--model", "demo", "--stretches", "6", "--tokens", "400"]) == 0
    result = json.loads(out.getvalue())
    assert result["bench"] == "accuracy" and result["machine"]["isa"]
    assert all(set(c) == {"case", "value", "unit", "reference", "ratio", "spread"} for c in result["cases"])
    return {c["case"]: c for c in result["cases"]}


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_perplexity_and_logits_stay_within_bounds(cases, kv_dtype):
    perplexity, error = BOUNDS[kv_dtype]
    assert 1 < cases[f"{kv_dtype} perplexity"]["value"] < 2  # the model knows this text
    assert abs(cases[f"{kv_dtype} perplexity"]["ratio"] - 1) <= perplexity
    assert 0 < cases[f"{kv_dtype} logit error"]["ratio"] <= error
    assert cases[f"{kv_dtype} same first choice"]["value"] > 0.97


def test_narrower_types_err_more(cases):
    errors = [cases[f"{name} logit error"]["value"] for name in BOUNDS]
    assert errors == sorted(errors)


def test_a_text_that_is_too_short_or_missing_is_named(tmp_path):
    (tmp_path / "short.txt").write_text("The with statement")
    with pytest.raises(UserError, match="--tokens 512"):
        main("accuracy", ["--model", "demo", "--text", str(tmp_path / "short.txt")])
    with pytest.raises(UserError, match=r"--text .*none.txt"):
        main("accuracy", ["--model", "demo", "--text", str(tmp_path / "none.txt")])
    with pytest.raises(UserError, match="2048 positions"):
        main("accuracy", ["--model", "demo", "--tokens", "5000"])
