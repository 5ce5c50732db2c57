"""Drafts after runs of tokens that occurred before, and how sure they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hpcdecode._ops_cpu import Drafter, TokenHistory


def found(tokens, count=4, shortest=2, longest=3):
    return TokenHistory(Drafter(shortest, longest, 0, 0.0), tokens).draft(count, 0.0)


def test_what_followed_the_last_tokens_before_is_continued():
    assert found([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert found([1, 2, 3, 4, 5, 6, 7, 1, 2], count=1) == [3]


def test_the_longest_run_wins_then_what_most_places_have_then_the_last():
    tokens = [9, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2, 50, 9, 1, 2]
    assert found(tokens, count=1) == [30]  # behind 9 1 2
    assert found(tokens, count=1, longest=2) == [50]
    assert found([5, 1, 2, 40, 6, 1, 2, 40, 7, 1, 2, 50, 8, 1, 2], count=1) == [40]


def test_a_repetition_goes_on():
    assert found([5, 1, 2, 1, 2], count=5) == [1, 2, 1, 2, 1]
    assert found([7, 7, 7], count=3) == [7, 7, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 9, 2, 9]])
def test_nothing_is_found_where_too_little_is_the_same(tokens):
    assert found(tokens) == []


def test_one_token_may_be_enough_and_none_may_be_asked_for():
    assert found([1, 9, 2, 9], shortest=1, count=2) == [2, 9]
    assert found([1, 2, 1, 2], count=0) == []


def test_lookup_agrees_with_a_plain_search():
    draw = np.random.default_rng(0)
    for _ in range(300):
        tokens = draw.integers(0, 4, draw.integers(2, 30)).tolist()
        assert found(tokens, 3, 1, 4) == searched(tokens, 3, 4)


def searched(tokens, count, longest):
    """Drafts of tokens that have at most 30 places, all of which count."""
    for same in range(min(longest, len(tokens) - 1), 0, -1):
        ends = [end for end in range(len(tokens) - 1, same - 1, -1) if tokens[end - same : end] == tokens[-same:]]
        whole = list(tokens)
        for place in range(count if ends else 0):
            token = Counter(whole[end + place] for end in ends).most_common(1)[0][0]
            ends = [end for end in ends if whole[end + place] == token]
            whole.append(token)
        if ends:
            return whole[len(tokens) :]
    return []


def test_what_others_generated_is_looked_up_and_what_they_were_given_is_not():
    drafter = Drafter(1, 8, 2, 0.0)
    first, second = TokenHistory(drafter, [1, 2, 3]), TokenHistory(drafter, [7, 1])
    assert second.draft(2, 0.0) == []
    first.extend([4, 5, 1, 6, 8])
    assert second.draft(3, 0.0) == [6, 8] and len(first) == 8
    TokenHistory(drafter, [9])  # the third: the first one's tokens are dropped
    first.extend([1, 6])
    assert second.draft(3, 0.0) == [] and first.draft(2, 0.0) == [8, 1]


def test_guesses_are_as_sure_as_their_kind_was_right():
    draw = np.random.default_rng(1)
    drafter = Drafter(1, 4, 100, 0.0)
    sure, unsure = TokenHistory(drafter, [1, 2, 3, 4] * 5), TokenHistory(drafter, draw.integers(10, 13, 20).tolist())
    assert sure.draft(4, 0.6) == []  # nobody knows yet
    for step in range(60):
        sure.draft(1, 0.99)
        unsure.draft(1, 0.99)
        sure.extend([1 + step % 4])
        unsure.extend(draw.integers(10, 13, 1).tolist())
    assert len(sure.draft(4, 0.8)) == 4 and unsure.draft(4, 0.8) == []
    assert unsure.draft(4, 0.0)


def test_what_a_grammar_forces_is_first_and_followed_by_what_came_behind_it():
    history = TokenHistory(Drafter(1, 4, 0, 0.0), [1, 2, 3, 4, 5, 9, 1])
    assert history.draft(4, 0.0) == [2, 3, 4, 5]
    assert history.draft(5, 0.0, [7, 2, 3]) == [7, 2, 3, 4, 5]  # 2 3 occurred before
    assert history.draft(2, 0.0, [7, 2, 3]) == [7, 2]
    assert history.draft(4, 0.0, [9]) == [9, 1, 9, 1]  # the run ends where the sequence does


def test_what_is_forced_and_never_right_is_not_guessed_any_more():
    history = TokenHistory(Drafter(1, 4, 0, 0.0), [1, 2])
    for _ in range(20):
        history.draft(2, 0.3, [5, 6])
        history.extend([1, 2])
    assert history.draft(3, 0.3, [5, 6])[:1] == [1]


def test_bad_settings():
    with pytest.raises(ValueError, match="expected at least 1 token, got 0"):
        Drafter(0, 3, 0, 0.0)
    with pytest.raises(ValueError, match="expected runs of at least 4 tokens, got 3"):
        Drafter(4, 3, 0, 0.0)
