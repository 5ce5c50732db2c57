"""From a row to its sequences: what an earlier run generated goes on, and samples fork from one prefill."""

from __future__ import annotations

from hpcdecode.requests.beams import Beams
from hpcdecode.requests.prefix import SharedBlocks
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops


def start_request(prompt: Prompt, max_new_tokens: int, lane: int, stops: Stops) -> Request:
    """Return a row's request with what an earlier run generated; at least one sequence is not finished."""
    params = prompt.params
    request = Request(prompt, max_new_tokens, lane)
    if params.beam_width:
        request.beams = Beams(params.beam_width, params.length_penalty, max_new_tokens, stops.ends_of(params))
    if prompt.targets:
        request.sequences = [SequenceState(request, i, target=target) for i, target in enumerate(prompt.targets)]
        return request
    request.sequences = [SequenceState(request, sample) for sample in range(params.samples)]
    for earlier in prompt.unfinished:
        request.sequences[earlier.sample].resume(earlier, stops)
    if request.finished:
        last = request.sequences[-1]
        request.sequences[-1] = SequenceState(request, last.sample)
    return request


def prefilled_sequences(request: Request, block_tokens: int) -> list[SequenceState]:
    """Return the sequences to prefill: of those that begin, the first, from which the others fork; or all targets'."""
    if request.prompt.targets:
        return list(request.sequences)
    fresh = [s for s in request.sequences if not s.generated]
    if len(fresh) > 1:
        fresh[0].forks = fresh[1:]
        blocks = SharedBlocks(0, fresh[0].prompt_length // block_tokens * block_tokens)
        for sequence in fresh:
            sequence.shared_blocks = blocks
    return fresh[:1] + [s for s in request.sequences if s.resumed and not s.finish_reason]
