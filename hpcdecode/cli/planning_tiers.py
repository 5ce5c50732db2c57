"""Tiers below KV caches, as the flags of `hpcdecode simulate` and `plan` describe them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import TierSpec

if TYPE_CHECKING:
    import argparse

    from hpcdecode.planning.layouts import GroupsAlike, PossibleLayout
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


def memory_of(options: argparse.Namespace, size: ModelSize, part: GroupsAlike) -> TieredMemory:
    """Return the memory of an R-rank of a group, and its tiers."""
    from hpcdecode.planning.profile import read
    from hpcdecode.planning.tiered import TieredMemory

    kv_dtype = read(options.profile).kv_dtype if options.profile else options.kv_dtype
    cores = len(os.sched_getaffinity(0)) if options.profile else _MANY
    nbytes = options.kv_memory if options.profile else int(part.capacity * part.unit.token_bytes)
    tiers = [TierSpec.parse(text) for text in options.kv_swap]
    return TieredMemory(list(size.shapes), kv_dtype, nbytes, tiers, options.schedule == "fluid", cores)
