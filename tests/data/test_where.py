"""Conditions on rows: columns of every row and of the input, compared by what their values are."""

from __future__ import annotations

import json

import pytest

import hpcdecode
from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.results.export import export
from hpcdecode.data.results.show import show
from hpcdecode.data.results.where import accepted, conditions_of
from hpcdecode.errors import UserError
from tests.support.results_files import result, writer

BIG = 2**53 + 1  # no float has it
ROWS = [
    {"label": "yes", "score": 9, "count": "9", "ok": True, "mixed": 1, "a=b": 1, "two words": "x > y", "some": None},
    {"label": "no", "score": 10, "count": "10", "ok": False, "mixed": "1", "a=b": 2, "two words": "", "some": 3},
    {"label": "yes", "score": 100, "count": "many", "ok": True, "mixed": [1, 2], "a=b": 3, "two words": "z"},
    {"label": "Yes", "score": -1, "count": "", "ok": True, "mixed": True, "a=b": BIG, "two words": "z", "some": 2},
]


@pytest.fixture(params=[True, False], ids=["complete", "not complete"])
def path(tmp_path, request):
    """A file of ROWS; the second has two samples. Columns of a file that is not complete are packed."""
    kept, out = KeptColumns(Selection(ALL)), tmp_path / "o.h5"
    with_columns = writer(out, kept=kept)
    for line, row in enumerate(ROWS, 1):
        kept.read(line, {"prompt": "p", **row})
        samples = [result(line, sample) for sample in range(2 if line == 2 else 1)]
        with_columns.add(*samples)
    with_columns.close(complete=request.param, summary={})
    return str(out)


def lines(path, *texts):
    with hpcdecode.read(path) as results:
        batches = accepted(results, conditions_of(texts, results), ["line"])
        return [line for batch in batches for line in batch["line"].tolist()]


@pytest.mark.parametrize(
    "texts, expected",
    [
        (["label=yes"], [1, 3]),
        (["label!=yes"], [2, 2, 4]),
        (["label = yes", "score>9"], [3]),
        (["score>=10"], [2, 2, 3]),
        (["score<9.5"], [1, 4]),
        (["count>=10"], [2, 2]),  # of texts those that are numbers
        (["count=9"], [1]),
        (["count="], [4]),
        (["label<no"], [4]),  # texts in the order of their characters
        (["ok=true"], [1, 3, 4]),
        (["ok!=True"], [2, 2]),
        (["mixed=1"], [1, 2, 2]),
        (["mixed=[1, 2]"], [3]),
        (["mixed=true"], [4]),
        (["mixed!=1"], [3, 4]),
        (["mixed>0"], [1, 2, 2]),
        (["some=null"], [1, 3]),
        (["some!=null"], [2, 2, 4]),
        (["some!=3"], [1, 3, 4]),
        (["some<3"], [4]),
        (["a=b=2"], [2, 2]),
        ([f"a=b={BIG}"], [4]),
        (["two words=x > y"], [1]),
        (["line>=3"], [3, 4]),
        (["sample=1"], [2]),
    ],
)
def test_values_are_compared_by_what_they_are(path, texts, expected):
    assert lines(path, *texts) == expected


@pytest.mark.parametrize(
    "text, reason",
    [
        ("label", "--where label: expected COLUMN, one of != >= <= = > <, and a value"),
        ("=yes", "expected COLUMN"),
        ("labels=yes", r"expected a column of line, .*, label, .*, got 'labels'; did you mean 'label'\?"),
        ("nothing_like_it=yes", r"got 'nothing_like_it'$"),
        ("score=high", "expected a number for score, got 'high'"),
        ("some>few", "expected a number for some, got 'few'"),
        ("ok=1", "expected = or != and true or false for ok, got = '1'"),
        ("ok<true", "expected = or != and true or false for ok, got < 'true'"),
        ("finish_reason=stopped", "expected stop or length for finish_reason, got 'stopped'"),
    ],
)
def test_conditions_that_cannot_be_used(path, text, reason):
    with pytest.raises(UserError, match=reason) as error:
        lines(path, text)
    assert "\n" not in str(error.value)


def test_show_and_export_take_the_rows(path, tmp_path):
    out = export(path, str(tmp_path / "o.jsonl"), where=["ok=false"], columns=["line", "sample", "score"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found == [{"line": 2, "sample": 0, "score": 10}, {"line": 2, "sample": 1, "score": 10}]
    said = list(show(path, where=["label=yes", "score<10"]))
    with hpcdecode.read(path) as results:
        state = "complete" if results.complete else "not complete"
    assert said[0] == f"{path}: 1 of 5 rows meet label=yes and score<10, {state}"
    assert len(said) == 2 and said[1].startswith("\n--- line 1, id ")
    assert len(list(show(path, ["2-3"], ["sample=0"]))) == 3 and len(list(show(path, ["9", "4"], ["label=yes"]))) == 1


def test_show_says_how_to_see_the_others(tmp_path):
    rows = writer(tmp_path / "o.h5")
    for line in range(1, 40):
        rows.add(result(line))
    rows.close(complete=True, summary={})
    *_, last = show(str(tmp_path / "o.h5"), where=["line>=10"])
    assert last == f"\n--- 25 more rows: hpcdecode show {tmp_path / 'o.h5'} 15-19 --where 'line>=10'"
    assert len(list(show(str(tmp_path / "o.h5"), ["15-19"], ["line>=10"]))) == 6
