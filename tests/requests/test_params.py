"""Sampling parameters are checked when they are made, with the messages that rows of prompt files get."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

import hpcdecode
from hpcdecode.data.prompts.fields import row_params
from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_k": "x"},
        {"n": True},
        {"max_tokens": 0},
        {"seed": 2**63},
        {"stop": ["a", ""]},
        {"stop": ["a", 1]},
        {"logit_bias": {"word": 1}},
        {"logit_bias": {"5": 101}},
        {"structured_outputs": {"regex": 3}},
        {"beam_width": 2, "n": 2},
        {"beam_width": 2, "length_penalty": float("nan")},
        {"beam_width": 2, "length_penalty": -1100.0},
        {"beam_width": 2, "length_penalty": 1100.0},
    ],
)
def test_the_message_is_that_of_a_row(fields):
    with pytest.raises(RowProblem) as of_row:
        row_params(fields, SamplingParams())
    with pytest.raises(ValueError) as of_call:
        SamplingParams(**fields)
    assert str(of_call.value) == str(of_row.value) and "\n" not in str(of_call.value)
    assert isinstance(of_call.value, hpcdecode.PromptError)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("temprature", "; did you mean 'temperature'?"),
        ("max_token", "; did you mean 'max_tokens'?"),
        ("Top-K", "; did you mean 'top_k'?"),
        ("nothing_like_it", ": expected some of n, max_tokens, "),
    ],
)
def test_names_that_are_not_known(name, meant):
    with pytest.raises(TypeError, match="sampling parameter '" + name) as error:
        SamplingParams(**{name: 1})
    assert meant in str(error.value)


def test_values_are_converted_as_those_of_rows():
    fields = {"stop": "a", "temperature": 1, "logit_bias": {5: 1}, "stop_token_ids": [3], "seed": None, "top_k": -1}
    made = SamplingParams(**fields)
    assert made == row_params({**fields, "logit_bias": {"5": 1}}, SamplingParams())
    assert made.stop == ("a",) and made.seed == 0 and type(made.temperature) is float and hash(made.stop_token_ids)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert msgspec.json.decode(msgspec.json.encode(made), type=SamplingParams) == made
