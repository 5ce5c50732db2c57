"""What the data types of KV and weights cost on the demo model, within the bounds that docs/performance.md states."""

import json

import pytest

from hpcdecode.bench.run import main
from hpcdecode.errors import UserError
from hpcdecode.model.lower import quantize

# Most change of perplexity, and most error of the logits as a share of their standard deviation.
KV_BOUNDS = {
    "float16": (1e-3, 1e-3),
    "bfloat16": (3e-3, 1e-2),
    "int8": (3e-3, 2e-2),
    "k8v4": (1e-2, 0.12),
    "int4": (1e-2, 0.15),
}
BOUNDS = {**KV_BOUNDS, "int8 weights": (1e-2, 5e-2)}


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


@pytest.mark.parametrize("name", BOUNDS)
def test_perplexity_and_logits_stay_within_bounds(cases, name):
    if name not in KV_BOUNDS and not quantize.exact():
        pytest.skip("this CPU has no exact int8 products")
    perplexity, error = BOUNDS[name]
    assert 1 < cases[f"{name} perplexity"]["value"] < 2  # the model knows this text
    assert abs(cases[f"{name} perplexity"]["ratio"] - 1) <= perplexity
    assert 0 < cases[f"{name} logit error"]["ratio"] <= error
    assert cases[f"{name} same first choice"]["value"] > 0.97


def test_narrower_types_err_more(cases):
    errors = [cases[f"{name} logit error"]["value"] for name in KV_BOUNDS]
    assert errors == sorted(errors)


def test_a_text_that_is_too_short_or_missing_is_named(tmp_path):
    (tmp_path / "short.txt").write_text("The with statement")
    with pytest.raises(UserError, match="--tokens 512"):
        main("accuracy", ["--model", "demo", "--text", str(tmp_path / "short.txt")])
    with pytest.raises(UserError, match=r"--text .*none.txt"):
        main("accuracy", ["--model", "demo", "--text", str(tmp_path / "none.txt")])
    with pytest.raises(UserError, match="2048 positions"):
        main("accuracy", ["--model", "demo", "--tokens", "5000"])
