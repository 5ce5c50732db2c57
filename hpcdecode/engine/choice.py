"""Which executors an S-rank's lanes have."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.engine.executors import (
    FusedExecutor,
    LayeredExecutor,
    RecordedExecutor,
    SideBySideExecutor,
    StepExecutor,
)
from hpcdecode.engine.group_lane import GroupLane, MpiGroupLane, OneMember
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.rotation import RotatingExecutor
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.model import SplitModel
from hpcdecode.model.run.fused_step import FusedStep
from hpcdecode.model.run.recorded_slices import RecordedSlices
from hpcdecode.system.timeline import Timeline


def executors(
    model: SplitModel,
    links: Sequence[SLink],
    groups: Sequence[GroupLane],
    prompts: PromptKvCache,
    timeline: Timeline,
) -> list[StepExecutor]:
    """Return the executors of an S-rank's lanes, the best first; the last suits every step."""
    rotating = [group for group in groups if isinstance(group, MpiGroupLane) and group.route.copies > 1]
    if rotating:
        return [RotatingExecutor(model, rotating, prompts, timeline)]
    found: list[StepExecutor] = []
    if len(links) == 1 and isinstance(links[0], LocalLink):
        fused = FusedStep.of(model, links[0].attention.kv_cache)
        found += [FusedExecutor(fused, model, links[0], prompts, timeline)] if fused else []
    if links and all(_shares_threads(link, prompts) for link in links):
        found.append(SideBySideExecutor(model, groups, prompts, timeline))
    recorded = RecordedSlices.of(model) if all(isinstance(group, OneMember) for group in groups) else None
    if recorded is not None:
        found.append(RecordedExecutor(recorded, model, groups, prompts, timeline))
    return [*found, LayeredExecutor(model, groups, prompts, timeline)]


def _shares_threads(link: SLink, prompts: PromptKvCache) -> bool:
    """Return whether prompts attend on the threads of the lane's KV cache, all of whose layers attend."""
    return isinstance(link, LocalLink) and prompts.attention.attends_beside(link.attention.kv_cache)
