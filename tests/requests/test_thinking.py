"""Budgets of reasoning: it has at most so many tokens, then its end, wherever a job was interrupted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.thinking import Thinking

TOKENS = st.lists(st.integers(1, 5), max_size=40)  # few, so that begins and ends come by chance, too


def written(thinking, budget, wished):
    """What a model that wishes for these tokens writes. The state is kept, and must not matter."""
    made, ended = [], False
    for token in wished:
        forced, now = thinking.forced(budget, made)
        if ended:
            assert forced is None, "an ended reasoning is not ended again"
        ended = ended or now
        made.append(token if forced is None else forced)
    return made


def find(tokens, wanted, start=0):
    places = range(start, len(tokens) - len(wanted) + 1)
    return next((i for i in places if tokens[i : i + len(wanted)] == wanted), None)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([[4], [4, 5], [4, 4, 5]]), st.integers(0, 12), TOKENS)
def test_a_reasoning_that_the_prompt_opened_ends_in_time(end, budget, wished):
    made = written(Thinking([3], end, True), budget, wished)
    if len(made) >= budget + len(end):
        assert find(made, end) is not None and find(made, end) <= budget
    natural = find(wished, end)
    if natural is not None and natural + len(end) <= budget:
        assert made == wished


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 12), TOKENS)
def test_only_a_reasoning_that_begins_is_ended(budget, wished):
    made, begin = written(Thinking([3], [4], False), budget, wished), find(wished[:9], [3])
    if begin is None:
        assert made == wished
    elif len(made) >= begin + 1 + budget + 1:
        assert find(made, [4], begin + 1) <= begin + 1 + budget
        assert made[: begin + 1] == wished[: begin + 1]


def test_an_end_that_has_begun_is_not_begun_again():
    assert written(Thinking([3], [4, 5], True), 2, [1, 4, 1, 1]) == [1, 4, 5, 1]


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget: expected an integer >= 0, got -1"),
        ({"structured_outputs": {"regex": "a"}}, "expected no structured_outputs beside it"),
        ({"beam_width": 2}, "beam_width: expected no thinking_token_budget beside it"),
    ],
)
def test_bad_budgets(more, reason):
    with pytest.raises(RowProblem, match=reason):
        SamplingParams(**{"thinking_token_budget": 3, **more}).check()
