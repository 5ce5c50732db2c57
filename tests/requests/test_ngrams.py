"""What prompt lookup finds."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.requests.ngrams import TokenHistory, following


def found(tokens, count=4, shortest=2, longest=3):
    return following(np.array(tokens, np.int32), count, shortest, longest)


def test_what_followed_the_last_tokens_before_is_continued():
    assert found([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert found([1, 2, 3, 4, 5, 6, 7, 1, 2], count=1) == [3]


def test_the_longest_run_wins_then_the_last():
    tokens = [9, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2, 50, 9, 1, 2]
    assert found(tokens, count=1) == [30]  # behind 9 1 2
    assert found(tokens, count=1, longest=2) == [50]


def test_a_repetition_goes_on():
    assert found([5, 1, 2, 1, 2], count=5) == [1, 2, 1, 2, 1]
    assert found([7, 7, 7], count=3) == [7, 7, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 9, 2, 9]])
def test_nothing_is_found_where_too_little_is_the_same(tokens):
    assert found(tokens) == []


def test_one_token_may_be_enough_and_none_may_be_asked_for():
    assert found([1, 9, 2, 9], shortest=1, count=2) == [2, 9]
    assert found([1, 2, 1, 2], count=0) == []


def test_history_grows():
    history = TokenHistory([1, 2, 3])
    for token in range(1000):
        history.extend([token, token])
    assert len(history) == 2003 and history.tokens[:5].tolist() == [1, 2, 3, 0, 0]
    assert history.tokens[-2:].tolist() == [999, 999]


def test_lookup_agrees_with_a_plain_search():
    draw = np.random.default_rng(0)
    for _ in range(300):
        tokens = draw.integers(0, 4, draw.integers(2, 30)).tolist()
        assert found(tokens, 3, 1, 4) == searched(tokens, 3, 4)


def searched(tokens, count, longest):
    for same in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, same - 1, -1):
            if tokens[end - same : end] == tokens[-same:]:
                whole = list(tokens)
                for place in range(count):
                    whole.append(whole[end + place])
                return whole[len(tokens) :]
    return []
