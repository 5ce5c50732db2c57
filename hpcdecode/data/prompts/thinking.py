"""Finds the tokens between which a model reasons, for rows that bound its reasoning."""

from __future__ import annotations

from collections.abc import Callable

from hpcdecode.errors import RowProblem
from hpcdecode.requests.output_parser import OutputParser
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.thinking import Thinking


def check_budget(params: SamplingParams, parser: OutputParser | None) -> None:
    """Raise RowProblem if a row bounds the reasoning and nothing says how that begins and ends."""
    if params.thinking_token_budget is not None and (parser is None or parser.tags is None):
        raise RowProblem(
            "thinking_token_budget: expected --reasoning-parser, or a model for which auto finds one, got a budget of "
            f"{params.thinking_token_budget} without"
        )


def thinking_of(
    params: SamplingParams,
    prompt: list[int],
    parser: OutputParser | None,
    encode: Callable[[list[str]], list[list[int]]],
    decode: Callable[[list[int]], str],
) -> Thinking | None:
    """Return how the reasoning after a prompt begins and ends; None if its length is not bounded.

    Args:
        params: Parameters of the row.
        prompt: Tokens of its prompt.
        parser: Knows the texts that begin and end the reasoning.
        encode: Returns the tokens of texts.
        decode: Returns the text of tokens, with special tokens.
    """
    if params.thinking_token_budget is None or parser is None or parser.tags is None:
        return None
    begin, end = encode(list(parser.tags))
    return Thinking(begin, end, parser.begins_reasoning(prompt, decode))
