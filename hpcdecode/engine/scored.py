"""Results of rows that are scored: the scores of targets become log-probabilities of continuations, or of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, fsum, inf, nan

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.result import Result
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.sequence import Request, SequenceState

_LARGEST_EXPONENT = 709.0  # of exp in float64


@dataclass
class Scored:
    """The tokens of a continuation, or of a text whose first tokens have no log-probability.

    Attributes:
        unscored: Number of the first tokens, which have none.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    greedy: bool = True
    unscored: int = 0

    @property
    def total(self) -> float:
        """Return the sum of the log-probabilities."""
        return fsum(self.logprobs.chosen[self.unscored :])

    @property
    def perplexity(self) -> float:
        """Return exp(-total / tokens that are scored)."""
        mean = -self.total / (len(self.token_ids) - self.unscored)
        return exp(mean) if mean < _LARGEST_EXPONENT else inf


def scored_results(request: Request, tokenizer: Tokenizer) -> list[Result]:
    """Return the results of a finished request whose sequences have targets, by the number of the continuation."""
    prompt = request.prompt
    scored = [of for _, of in sorted(scores_of(request.sequences, whole=not prompt.token_ids).items())]
    totals = [each.total for each in scored]
    best = max(range(len(totals)), key=totals.__getitem__)
    times = [sequence.times for sequence in request.sequences]
    return [
        Result(
            line=prompt.line,
            id=prompt.id,
            sample=sample,
            text=prompt.texts[sample] if prompt.texts else tokenizer.decode(each.token_ids, skip_special_tokens=False),
            finish_reason="length",
            prompt_tokens=len(prompt.token_ids),
            token_ids=each.token_ids,
            queued_at=min(t.queued for t in times),
            first_token_at=min(t.first_token for t in times),
            finished_at=max(t.finished for t in times),
            logprobs=each.logprobs,
            cumulative_logprob=totals[sample],
            perplexity=each.perplexity,
            is_greedy=each.greedy,
            is_best=sample == best,
            adapter=prompt.lora,
            shortcuts=request.shortcuts,
        )
        for sample, each in enumerate(scored)
    ]


def scores_of(sequences: Sequence[SequenceState], *, whole: bool) -> dict[int, Scored]:
    """Return what was scored, by the number of the continuation. Targets of one continuation follow one another.

    Args:
        sequences: Of a request, finished.
        whole: Whether the tokens before the first that is scored belong to it, too: it is a text.
    """
    found: dict[int, Scored] = {}
    for sequence in sequences:
        target, scores = sequence.target, sequence.scores
        assert target is not None, "expected sequences that are scored"
        body, ends = list(_entries(scores.body)), list(_entries(scores.ends))
        for end, (sample, last) in enumerate(zip(target.samples, target.last, strict=True)):
            if sample not in found:
                found[sample] = Scored()
                if whole:
                    _add_unscored(found[sample], target.input_ids[: target.start])
            own = found[sample]
            own.token_ids += [*target.input_ids[target.start :], last]
            for entry in (*body, ends[end]):
                own.logprobs.add(*entry)
            own.greedy = own.greedy and all(scores.greedy) and scores.greedy_ends[end]
    return found


def _add_unscored(scored: Scored, token_ids: list[int]) -> None:
    for token in token_ids:
        scored.token_ids.append(token)
        scored.logprobs.add(nan, [], [])
    scored.unscored = len(token_ids)


def _entries(held: Logprobs) -> Iterator[tuple[float, list[int], list[float]]]:
    return zip(held.chosen, held.top_ids, held.top, strict=True)
