"""Stop strings and stop tokens: where a sequence ends, and what its text is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops

DEMO = Path(__file__).parents[2] / "jobs" / "demo" / "model"
TEXTS = (
    "The with statement wraps the execution of a block. It does so with methods.\n\nNext one.",
    "naïve 日本語のテキスト、そして 😀😀 emoji; mixed \u00e9\u00e8 bytes 日本",
    "aaaaaaaabaaaaaaaac" * 3,
)
STOPS = (
    ("block. It",),
    ("語のテ",),
    ("😀😀 e", "zzz"),
    ("\n\n",),
    ("aab", "b"),
    (" so", "does so with"),
    ("c" * 9,),
    ("日本",),
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO)


def run(tokenizer, ids, resumed=0, max_new=10**6, eos=frozenset(), **params):
    """Accept the ids one by one until they end the sequence, the first `resumed` as those of an earlier run."""
    prompt = Prompt(1, "1", [1], SamplingParams(max_tokens=10**6, **params))
    sequence, stops = SequenceState(Request(prompt, max_new, lane=0)), Stops(eos, tokenizer.decode)
    if resumed:
        sequence.resume(Unfinished(1, 0, ids[:resumed]), stops)
    for token in ids[resumed:]:
        sequence.accept(token, stops)
        if sequence.finish_reason:
            break
    return sequence


def expected_end(tokenizer, ids, stop):
    """Tokens until a stop string is in the decoded text, and where the first to be complete begins and ends."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        if found and not text.endswith("\ufffd"):
            end, begin = min(found)
            return count, text[:begin], text[:end]
    return len(ids), tokenizer.decode(ids), tokenizer.decode(ids)


def spelled(tokenizer, text, seed):
    """Token ids of a text that was cut at random places, so that stop strings lie across tokens in many ways."""
    draw, ids = random.Random(seed), []
    while text:
        count = draw.randint(1, 6)
        ids += tokenizer.encode_texts([text[:count]], add_special_tokens=False)[0]
        text = text[count:]
    return ids


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("stop", STOPS, ids=range(len(STOPS)))
def test_a_sequence_ends_where_its_text_has_a_stop_string(tokenizer, text, stop):
    for seed in range(5):
        ids = spelled(tokenizer, text, seed)
        count, before, through = expected_end(tokenizer, ids, stop)
        for include, shown in ((False, before), (True, through)):
            made = run(tokenizer, ids, stop=stop, include_stop_str_in_output=include)
            assert len(made.generated) == count and made.text(tokenizer.decode) == shown
            assert made.finish_reason == ("stop" if any(s in text for s in stop) else None)
            for resumed in range(0, count, 7):
                again = run(tokenizer, ids, resumed, stop=stop, include_stop_str_in_output=include)
                assert again.generated == made.generated and again.text(tokenizer.decode) == shown


def test_characters_of_several_tokens_are_looked_at_when_complete(tokenizer):
    ids = tokenizer.encode_texts(["日本"], add_special_tokens=False)[0]
    assert len(ids) > 2  # bytes
    made = run(tokenizer, ids, stop=("本",))
    assert made.finish_reason == "stop" and made.generated == ids and made.text(tokenizer.decode) == "日"
    assert run(tokenizer, ids[:-1], stop=("\ufffd",)).finish_reason is None


def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = spelled(tokenizer, "ab, ab, ab, ab, ab, ab", 1)
    for least in range(len(ids)):
        made = run(tokenizer, ids, stop=("ab",), min_tokens=least)
        assert len(made.generated) > least and made.finish_reason == "stop"
        text = tokenizer.decode(made.generated)
        assert made.text(tokenizer.decode) == text[: text.rindex("ab")]
        earlier = run(tokenizer, ids, min(least, 3), stop=("ab",), min_tokens=least)
        assert earlier.generated == made.generated


def test_a_stop_string_wins_over_the_last_token_and_a_stop_token_hides(tokenizer):
    ids = spelled(tokenizer, "one two three", 2)
    cut = len(expected_end(tokenizer, ids, ("two",))[1])
    count = expected_end(tokenizer, ids, ("two",))[0]
    made = run(tokenizer, ids, max_new=count, stop=("two",))
    assert made.finish_reason == "stop" and made.text(tokenizer.decode) == "one two three"[:cut]
    assert run(tokenizer, ids, max_new=count).finish_reason == "length"
    token = ids[-1]
    for include in (False, True):
        made = run(tokenizer, ids, stop_token_ids=(token,), include_stop_str_in_output=include)
        shown = made.generated if include else made.generated[:-1]
        assert made.finish_reason == "stop" and made.generated[-1] == token
        assert made.text(tokenizer.decode) == tokenizer.decode(shown)


def test_special_tokens_are_shown_where_asked_for(tokenizer):
    eos = next(iter(tokenizer.eos_token_ids))
    ids = [*spelled(tokenizer, "the end", 3), eos]
    plain = run(tokenizer, ids, eos=tokenizer.eos_token_ids, skip_special_tokens=False)
    assert plain.text(tokenizer.decode) == "the end"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    made = run(tokenizer, ids, eos=tokenizer.eos_token_ids, **shown)
    assert made.text(tokenizer.decode) == "the end" + tokenizer.decode([eos], False) and len(
        tokenizer.decode([eos], False)
    )
