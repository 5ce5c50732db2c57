"""Stages of pipeline parallelism: runs of layers that take about as many bytes of weights each."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.choose import takes_choice
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.split import Split


def stages_of(parts: Split, count: int) -> list[range]:
    """Return the layers of every stage. The last stage has the LM head, too.

    A stage ends where the largest one is smallest.

    Args:
        parts: A model in slices.
        count: Number of stages.

    Raises:
        UserError: If there are fewer layers than stages, of those at which a stage can begin.
    """
    layers, mixers = len(parts.slices) - 1, parts.trace.attends
    if not 1 <= count <= layers:
        raise UserError(f"--pp {count}: expected 1 to {layers}, the layers of the model, got {count}")
    begins = [i for i in range(layers) if not takes_choice(mixers[i])]
    if count > len(begins):
        raise UserError(
            f"--pp {count}: expected 1 to {len(begins)}, the layers with indexers of their own, got {count}: layers "
            "that attend to what the one before has chosen stay with it"
        )
    sizes = [sum(tensor_meta(node).numel_per_token for node in part.weights) for part in parts.slices]
    ends = list(accumulate(sizes[:-1], initial=0))
    best = {(0, 0): (0, [0])}  # by stages and layers that they have: largest stage, and where stages begin
    for stage in range(1, count + 1):
        head = sizes[-1] if stage == count else 0
        for last in range(stage, layers + 1):
            options = (
                (max(best[stage - 1, first][0], ends[last] - ends[first] + head), [*best[stage - 1, first][1], last])
                for first in begins
                if stage - 1 <= first < last and (stage - 1, first) in best
            )
            if found := min(options, key=lambda option: option[0], default=None):
                best[stage, last] = found
    bounds = best[count, layers][1]
    return [range(first, last) for first, last in pairwise(bounds)]
