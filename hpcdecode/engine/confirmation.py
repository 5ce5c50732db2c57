"""Drafts that a step confirms: the logits behind each right token tell one more."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdecode.engine.inputs import Inputs, take_logprobs
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.sampling.grammars import Grammars
from hpcdecode.sampling.rows import rows_of
from hpcdecode.sampling.sampler import sample
from hpcdecode.schedule.speculation import is_right
from hpcdecode.schedule.step import Step


def confirmed(
    step: Step, inputs: Inputs, stops: Stops, grammars: Grammars | None
) -> Iterator[tuple[list[SequenceState], list[int]]]:
    """Yield sequences whose draft has been right so far, and the token behind it for each, which they must take.

    Args:
        step: Whose sequences have taken their first tokens.
        inputs: Of the step, with what tokens were drawn from.
        stops: What ends a sequence.
        grammars: Needed if rows have structured outputs.
    """
    logits, first, place, going = inputs.drawn, inputs.first_rows, 0, step.decode
    largest: list[int] = logits.tolist() if first and logits is not None and logits.dim() == 1 else []
    while going := [s for s in going if is_right(s, place)]:
        assert logits is not None, "expected the logits of drafts"
        place += 1
        rows = [first[id(s)] + place for s in going]
        if largest:
            yield going, [largest[row] for row in rows]
            continue
        own = rows_of(logits, rows)
        tokens = sample(own, going, stops.eos, grammars)
        take_logprobs(own, going, tokens)
        yield going, tokens
