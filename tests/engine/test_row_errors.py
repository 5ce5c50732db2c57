"""Reasons of row errors, by their causes."""

import pytest

from hpcdecode.engine.row_errors import cause_of


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("max_tokens: expected an integer >= 1, got -2.5", "max_tokens: expected an integer >= 1, got N"),
        ("expected UTF-8 text, got invalid UTF-8: byte 7", "expected UTF-8 text, got invalid UTF-8: byte N"),
        ('stop[3]: expected one of a, got "b 7"', 'stop[N]: expected one of a, got "..."'),
        ("rows.csv:3: expected a, got [12, 13]", "expected a, got [N, N]"),
    ],
)
def test_causes_leave_values_out(reason, cause):
    assert cause_of(reason, several=reason.startswith("rows")) == cause
