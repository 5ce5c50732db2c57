"""Questions about documents, question by question: a document is prefilled once, and the rows stay the same."""

from __future__ import annotations

import json

import pytest

from tests.support.worlds import contents

DOCUMENTS, QUESTIONS, LENGTH = 12, 6, 200
ONCE = 192  # tokens of a document, in whole blocks
MOST = DOCUMENTS * (QUESTIONS - 1) * ONCE  # prompt tokens that can be shared


@pytest.fixture(scope="module")
def flags(checkpoint):
    return ("--model", checkpoint("llama3"), "--max-tokens", 8, "--dtype", "float32", "--ignore-eos", "--batch", 12)


@pytest.fixture
def asked(tmp_path):
    """The file of the rows."""
    rows = [
        {"id": f"{d} {q}", "prompt_token_ids": [5 + (7 * d + j) % 400 for j in range(LENGTH)] + [9 + q] * (3 + q)}
        for q in range(QUESTIONS)
        for d in range(DOCUMENTS)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("ranks", "own", "least"),
    [
        (1, (), 1.0),
        (1, ("--lanes", 2), 0.9),
        (2, (), 0.9),
        (3, ("--layout", "split", "--s-ranks", 2, "--lanes", 2), 0.7),  # by when lanes ask: 0.82 to 0.95
        (4, ("--layout", "split", "--s-ranks", 1, "--kv-memory", "1M"), 0.9),  # an R-rank has some of the documents
        (4, ("--layout", "split", "--s-ranks", 1, "--kv-memory", "640K"), 0.6),  # and of some a copy
    ],
)
def test_rows_about_a_document_share_it(hpcdecode, asked, flags, tmp_path, ranks, own, least):
    found = {}
    for name, more, count in (("apart", ("--no-prefix-sharing",), 1), ("shared", own, ranks)):
        result = hpcdecode("generate", asked, "-o", f"{name}.h5", *flags, *more, ranks=count)
        assert result.returncode == 0, result.stderr
        found[name] = contents(tmp_path / f"{name}.h5")
    assert found["shared"][0] == found["apart"][0]
    assert found["apart"][2]["shared_prompt_tokens"] == 0
    assert least * MOST <= found["shared"][2]["shared_prompt_tokens"] <= MOST
