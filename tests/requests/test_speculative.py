"""Settings of speculative decoding, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdecode.requests.speculative import SpeculativeConfig


def test_settings_are_given_as_text_dictionary_or_as_they_are():
    made = SpeculativeConfig.of('{"method": "suffix", "num_speculative_tokens": 3}')
    assert made == SpeculativeConfig.of({"num_speculative_tokens": 3}) == SpeculativeConfig(num_speculative_tokens=3)
    second = SpeculativeConfig.of({"model": Path("a/b"), "quantization": "int8"})
    assert (second.method, second.model) == ("draft_model", "a/b") and SpeculativeConfig.of(second) == second
    assert SpeculativeConfig.of(made) == made and SpeculativeConfig.of("{}") == SpeculativeConfig()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("ngram", "expected a JSON object with some of method, num_speculative_tokens"),
        ("[3]", "expected a JSON object"),
        ({"drafter": "draft"}, "unknown field `drafter`"),
        ({"model": 3}, "Expected `str | null`, got `int`"),
        ({"model": object()}, "expected a JSON object with some of method"),
        (
            {"model": "draft", "method": "suffix"},
            "method: expected draft_model with a model, and no other, got 'suffix'",
        ),
        ({"method": "draft_model"}, "method: expected draft_model with a model, and no other"),
        ({"quantization": "int4"}, "quantization: expected it with a model or mtp, got 'int4' alone"),
        ({"num_speculative_tokens": "3"}, "Expected `int`, got `str`"),
        ({"method": "eagle"}, "method: expected one of suffix, ngram, draft_model, mtp, got 'eagle'"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens: expected an integer in \[1, 64\], got 0"),
        ({"num_speculative_tokens": 65}, "got 65"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "expected 1 <= min <= max, got 4 and 3"),
        ({"prompt_lookup_min": 0}, "got 0 and 5"),
        ({"suffix_decoding_max_tree_depth": 0}, r"depth: expected an integer in \[1, 64\], got 0"),
        ({"suffix_decoding_max_cached_requests": -1}, "requests: expected an integer of at least 0, got -1"),
        ({"suffix_decoding_min_token_prob": 1.5}, r"prob: expected a number in \[0, 1\], got 1.5"),
    ],
)
def test_bad_settings(given, problem):
    with pytest.raises(ValueError, match=problem):
        SpeculativeConfig.of(given)
