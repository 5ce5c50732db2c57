"""Whether the KV cache can hold the prompts of a call, before any work."""

from __future__ import annotations

from hpcdecode.engine.engine import Engine
from hpcdecode.engine.scale import Scale, lane_limits, placement_of
from hpcdecode.errors import PromptError
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.admission import problem_of, sequences_of


def require_capacity(engine: Engine, prompts: list[Prompt], scale: Scale) -> None:
    """Raise PromptError for the first prompt that the first lane of an engine of one process can never run."""
    options, setup, stops, batch = engine.options, engine.setup, engine.stops, scale.lanes[0]
    limits, placement = lane_limits(options, setup, batch, scale), placement_of(options, engine.team, setup, 1)
    for prompt in prompts:
        sequences = sequences_of(prompt, 0, limits, placement, stops)
        if problem := problem_of(sequences, limits, placement):
            raise PromptError(f"prompt {prompt.line}: {problem}")
