"""The page that says which model types run: it names all, and its rows are short."""

from __future__ import annotations

import sys

import pytest
import transformers

from tests import survey
from tests.support.commands import ROOT
from tests.support.survey_page import in_short, listed, page, row, types

PAGE = ROOT / "docs/models.md"
ALL = [name for names in types().values() for name in names]


def test_the_page_names_every_type_that_the_survey_knows():
    version, names = listed(PAGE.read_text())
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}: make survey")
    assert names == ALL and len(set(ALL)) == len(ALL)


def test_nothing_on_the_page_is_silently_wrong():
    text = PAGE.read_text()
    assert "| wrong |" not in text and "| fails |" not in text and "| crashes |" not in text
    errors = [float(line.split("|")[3]) for line in text.splitlines() if "| works |" in line]
    assert len(errors) > 140 and max(errors) < survey.LIMIT


def test_a_page_has_a_short_row_for_every_type():
    states = (
        {"state": "works", "error": 3.21e-6},
        {"state": "refused", "reason": "layer 0 is 'a | b'; expected one of conv, full_attention"},
        {"state": "no tiny model", "reason": "TypeError: " + "very long words " * 40},
        {"state": "encoder-decoder"},
    )
    text = page({name: states[i % 4] for i, name in enumerate(ALL)})
    assert listed(text) == (transformers.__version__, ALL)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and f"| {ALL[0]} | works | 3.2e-06 |" in lines
    assert f"| {ALL[1]} | refused | layer 0 is 'a b' |" in lines and f"| {ALL[3]} | encoder-decoder |  |" in lines
    assert row(ALL[2], states[2]) in lines and row(ALL[2], states[2]).endswith("words ... |")


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        ("torch.export cannot trace it (UserError: Constraints violated (T)! For more", "(UserError)"),
        (
            "Strict: Class validation error for validator 'a':\n   ValueError: x must be 1. Or",
            "ValueError: x must be 1",
        ),
        ("A builds an attention mask of its own, which the R-part does not apply: not supported", "of its own"),
    ],
)
def test_reasons_are_shortened(reason, short):
    assert in_short(reason).endswith(short) and "\n" not in in_short(reason)


def test_a_page_of_some_types_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["survey", "--write", "models.md", "llama"])
    with pytest.raises(SystemExit):
        survey.main()
    assert "--write: expected no model types, since the page has all; leave them out" in capsys.readouterr().err
