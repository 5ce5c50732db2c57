"""Sequences that go on from what an earlier run of the job generated."""

from __future__ import annotations

from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops


def test_what_an_earlier_run_kept_stays_as_it_was_while_its_sequence_goes_on():
    """A checkpoint between two results of one step still writes what the earlier run kept."""
    earlier = Unfinished(1, 0, [5, 6], Logprobs([-0.5, -0.25], [[5], [6]], [[-0.5], [-0.25]]))
    sequence = SequenceState(Request(Prompt(1, "1", [1], SamplingParams(logprobs=1)), 9, lane=0))
    sequence.resume(earlier, Stops(frozenset(), lambda ids, skip: ""))
    sequence.accept(7, Stops(frozenset(), lambda ids, skip: ""))
    sequence.logprobs.add(-1.0, [7], [-1.0])
    assert (sequence.generated, sequence.logprobs.chosen) == ([5, 6, 7], [-0.5, -0.25, -1.0])
    assert (earlier.token_ids, earlier.logprobs.chosen) == ([5, 6], [-0.5, -0.25])
    assert (earlier.logprobs.top_ids, earlier.logprobs.top) == ([[5], [6]], [[-0.5], [-0.25]])
