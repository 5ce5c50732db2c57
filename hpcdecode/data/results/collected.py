"""Results in memory: the outputs of the Python API, and a writer that collects them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import TypeVar

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.result import Result
from hpcdecode.errors import PromptError
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.output_parser import ToolCall
from hpcdecode.requests.prompt import Unfinished

T = TypeVar("T")


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: Number of the sample, from 0.
        text: Generated text.
        token_ids: Generated tokens.
        finish_reason: `stop` or `length`.
        cumulative_logprob: Sum of the tokens' log-probabilities; None if they were not asked for.
        logprobs: For every token the log-probabilities of the token itself and of the most likely ones, by token id.
            None if they were not asked for.
        reasoning: What the model thought, if the texts are parsed (`LLM(reasoning_parser=...)`); None if nothing.
        content: What it said beside that and calls, likewise.
        tool_calls: The calls of tools, in the form of the OpenAI API; None if there are none.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    cumulative_logprob: float | None
    logprobs: list[dict[int, float]] | None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """Result of one prompt.

    Attributes:
        request_id: The prompt's id, or its number.
        prompt: Text of the prompt; None if it was given as token ids.
        prompt_token_ids: Tokens of the prompt.
        outputs: Samples.
        prompt_logprobs: Log-probabilities of the prompt's tokens, as in an output; the first token has None.
            None if they were not asked for.
        finished: Always True.
        num_cached_tokens: Tokens of the prompt whose K and V other prompts had.
        error: Why the prompt has no outputs, if it could not be used and `generate_iter` was to yield such prompts;
            None otherwise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float] | None] | None
    finished: bool = True
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class ScoredOutput:
    """What was scored of a prompt: a continuation, or the prompt itself as a text.

    Attributes:
        index: Number of the continuation, from 0.
        text: Its text; empty for a text, which is the prompt.
        token_ids: Its tokens.
        cumulative_logprob: Sum of the tokens' log-probabilities.
        perplexity: exp(-sum / tokens that have a log-probability).
        is_greedy: Whether greedy decoding would take all of these tokens.
        logprobs: As in a CompletionOutput; None for the first token of a text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    perplexity: float
    is_greedy: bool
    logprobs: list[dict[int, float] | None]


@dataclass(frozen=True)
class ScoreOutput:
    """Scores of one prompt.

    Attributes:
        request_id: The prompt's id, or its number.
        prompt: Text of the prompt; None if it was given as token ids.
        prompt_token_ids: Tokens before every continuation; none before a text.
        outputs: What was scored, in the order of the row.
        best: Index of the output with the greatest sum, of equal ones the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[ScoredOutput]
    best: int


class CollectedResults:
    """Writer that keeps results in memory."""

    def __init__(self) -> None:
        self.error_count = 0
        self.unfinished: Callable[[], list[Unfinished]] = list
        self._results: dict[int, list[Result]] = {}  # by line

    def add(self, *samples: Result) -> None:
        """Keep the samples of a finished row."""
        self._results[samples[0].line] = sorted(samples, key=lambda r: r.sample)

    def error(self, e: RowError) -> None:
        """Raise PromptError."""
        raise prompt_error(e)

    def tick(self) -> None:
        """Do nothing: there is no file to write."""

    def samples(self, line: int) -> list[Result]:
        """Return the samples of a prompt, by its line."""
        return self._results[line]


def output_of(samples: Sequence[Result], prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
    """Return what the caller gets of a prompt.

    Args:
        samples: In their order.
        prompt: Text of the prompt; None if it was given as token ids.
        prompt_token_ids: Tokens of the prompt.
    """
    first, outputs = samples[0], [_output(r) for r in samples]
    held = first.prompt_logprobs
    logprobs = None if held is None else [None, *_likely(first.prompt_token_ids, held)[1:]]
    cached = first.shortcuts.cached_tokens
    return RequestOutput(first.id, prompt, prompt_token_ids, outputs, logprobs, num_cached_tokens=cached)


def score_of(samples: Sequence[Result], prompt: str | None, prompt_token_ids: list[int]) -> ScoreOutput:
    """Return what the caller gets of a prompt that is scored; the arguments are those of `output_of`."""
    best = next(r.sample for r in samples if r.is_best)
    return ScoreOutput(samples[0].id, prompt, prompt_token_ids, [_scored(r) for r in samples], best)


def _output(r: Result) -> CompletionOutput:
    logprobs = _known(r.cumulative_logprob), _by_token(r)
    whole = CompletionOutput(r.sample, r.text, r.token_ids, r.finish_reason, *logprobs)
    return replace(whole, reasoning=r.reasoning or None, content=r.content or None, tool_calls=r.tool_calls or None)


def _scored(result: Result) -> ScoredOutput:
    held = result.logprobs
    assert held is not None, "expected a result that was scored"
    each = zip(held.chosen, _likely(result.token_ids, held), strict=True)
    logprobs = [None if isnan(own) else by_token for own, by_token in each]
    sums = result.cumulative_logprob, result.perplexity, bool(result.is_greedy)
    return ScoredOutput(result.sample, result.text, result.token_ids, *sums, logprobs)


def _known(logprob: float) -> float | None:
    return None if isnan(logprob) else logprob


def _by_token(result: Result) -> list[dict[int, float]] | None:
    return None if result.logprobs is None else _likely(result.token_ids, result.logprobs)


def _likely(token_ids: Sequence[int], held: Logprobs) -> list[dict[int, float]]:
    each = zip(token_ids, held.chosen, held.top_ids, held.top, strict=True)
    return [{**dict(zip(ids, values, strict=True)), token: own} for token, own, ids, values in each]


def prompt_error(error: RowError, others: int = 0) -> PromptError:
    """Return the exception for a prompt that cannot be used, which mentions `others` such prompts."""
    more = f" (and {others} more that cannot be used)" if others else ""
    return PromptError(f"prompt {error.line}: {error.reason}{more}")


def usable(items: Iterable[T | RowError]) -> list[T]:
    """Return the items, or raise PromptError for the first that is an error."""
    found: list[T] = []
    errors: list[RowError] = []
    for item in items:
        if isinstance(item, RowError):
            errors.append(item)
        else:
            found.append(item)
    if errors:
        raise prompt_error(errors[0], len(errors) - 1)
    return found
