"""Tiers below KV caches, as the flags of `hpcdecode simulate` and `plan` describe them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpcdecode.config import ADMISSIONS
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import TierSpec

if TYPE_CHECKING:
    import argparse

    from hpcdecode.planning.layout_planner import PlannedLayout
    from hpcdecode.planning.layouts import GroupsAlike, PossibleLayout
    from hpcdecode.planning.lengths import Lengths
    from hpcdecode.planning.model_size import ModelSize
    from hpcdecode.planning.tiered import TieredMemory

_MANY = 64  # cores of an R-rank that is not here


def require_use(options: argparse.Namespace) -> None:
    """Raise UserError if tiers are given that nothing uses."""
    if options.kv_swap and options.schedule != "fluid" and options.admission != "optimistic":
        raise UserError(
            "--kv-swap: expected --admission optimistic or --schedule fluid, as no row gives up its room otherwise, "
            "got neither; change it, or leave --kv-swap out"
        )


def require_layout(layout: PossibleLayout) -> None:
    """Raise UserError if jobs have no tiers in a layout."""
    if layout.shape.size > 1 or layout.shape.copies > 1 or layout.shape.prefill:
        raise UserError(f"--kv-swap: expected groups of one S-rank, got {layout.name}; leave out {layout.flags}")
    if any(part.sharing > 1 for part in layout.parts):
        raise UserError("--kv-swap: expected R-ranks that serve one S-rank, got --pools shared; add --pools own")


def schedule_text(options: argparse.Namespace, size: ModelSize, plan: PlannedLayout, lengths: Lengths) -> str:
    """Return what `plan` says of schedules and admissions in the layout that it has chosen.

    Args:
        options: With tiers, an admission, or both.
        size: The model.
        plan: The layout, and B, F and lanes of its groups.
        lengths: Of the rows.
    """
    from msgspec.structs import replace

    from hpcdecode.planning.schedule_choice import choose_schedule, text

    require_layout(plan.layout)
    part, group = plan.layout.parts[0], plan.groups[0]
    memory = memory_of(options, size, part)
    shorter = bool((lengths.new < lengths.most).any())
    admissions = (options.admission,) if options.admission else ADMISSIONS if shorter else ADMISSIONS[:1]
    speeds = {rotates: replace(memory, rotates=rotates).speeds() if memory.tiers else [] for rotates in (False, True)}
    own = lengths.part(0, part.count)
    return text(choose_schedule(memory, part.cost, own, group.lanes, part.r_ranks, admissions, speeds))


def memory_of(options: argparse.Namespace, size: ModelSize, part: GroupsAlike) -> TieredMemory:
    """Return the memory of an R-rank of a group, and its tiers."""
    from hpcdecode.planning.profile import read
    from hpcdecode.planning.tiered import TieredMemory

    kv_dtype = read(options.profile).kv_dtype if options.profile else options.kv_dtype
    cores = len(os.sched_getaffinity(0)) if options.profile else _MANY
    nbytes = options.kv_memory if options.profile else int(part.capacity * part.unit.token_bytes)
    rotates = getattr(options, "schedule", None) == "fluid"
    tiers = [TierSpec.parse(text) for text in options.kv_swap]
    return TieredMemory(list(size.shapes), kv_dtype, nbytes, tiers, rotates, cores, here=bool(options.profile))
