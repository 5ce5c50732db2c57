"""The ranks that the flags of `hpcdecode simulate` and `plan` describe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpcdecode.cli.planning_flags import require_ranks
from hpcdecode.errors import UserError
from hpcdecode.ranks.wishes import GroupShape, Wishes

if TYPE_CHECKING:
    import argparse

    from hpcdecode.planning.cluster import Cluster
    from hpcdecode.planning.hardware import Device
    from hpcdecode.planning.model_size import ModelSize


def asked_shape(options: argparse.Namespace) -> GroupShape | None:
    """Return the shape of groups that the flags ask for, or None if they do not say."""
    if options.tp is None and options.pp is None and options.route is None and not options.prefill_ranks:
        return None
    if options.prefill_ranks and not options.s_ranks:
        raise UserError(f"--prefill-ranks {options.prefill_ranks}: expected --s-ranks of 1 or more, got 0")
    asked = {"tp": options.tp, "pp": options.pp or 1, "route": options.route or "fixed"}
    prefill = {"s_ranks": options.s_ranks, "prefill_ranks": options.prefill_ranks} if options.prefill_ranks else {}
    return Wishes(layout=options.layout or "split", **asked, **prefill).shape(options.s_ranks)


def shapes_of(options: argparse.Namespace, size: ModelSize) -> list[GroupShape]:
    """Return the shapes of groups to look at: what is asked for, or one rank and those that the weights fit."""
    from hpcdecode.planning.group_shape import ONE, tried
    from hpcdecode.planning.profile import read

    asked = asked_shape(options)
    if asked is not None:
        return [asked]
    if options.profile is not None:
        return [GroupShape(tp, 1) for tp in read(options.profile).tensor_parallel]
    counts = _counts(options)
    kinds = list(zip(_devices(options), counts, strict=True))
    found = [tried(size, device.room, count) for device, count in kinds if count]
    least = [shape for shapes in found for shape in shapes]
    rotating = [GroupShape(s.tp, 1, counts[0] // s.tp) for s in (ONE, *found[0]) if s.pp == 1 and counts[0] % s.tp == 0]
    return list(dict.fromkeys([ONE, *least, *(s for s in rotating if counts[1] and s.copies > 1)]))


def cluster_of(options: argparse.Namespace, size: ModelSize, shape: GroupShape) -> Cluster:
    """Return the ranks that the flags describe, in groups of a shape.

    Raises:
        UserError: If the profile does not speak of them.
    """
    from hpcdecode.planning import cluster
    from hpcdecode.planning.hardware import LinkSpeed
    from hpcdecode.planning.profile import read

    network = LinkSpeed(options.link * 1e9 / 8, options.latency * 1e-6)
    if options.profile is None:
        (s, r), (s_count, r_count) = _devices(options), _counts(options)
        kinds = s, s_count, r, r_count
        return cluster.by_data_sheets(size, *kinds, network, options.kv_dtype, options.kv_memory, shape)
    profile = read(options.profile)
    ranks = profile.ranks if options.r_ranks is None else options.s_ranks + options.r_ranks
    if profile.ranks not in (1, ranks):
        raise UserError(
            f"--r-ranks: expected {profile.ranks - options.s_ranks}, as {options.profile} was measured on "
            f"{profile.ranks} ranks, got {options.r_ranks}"
        )
    require_ranks(options.s_ranks, ranks - options.s_ranks)
    return cluster.by_profile(profile, ranks, options.kv_memory, size, network, shape)


def _counts(options: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of S devices and of R devices."""
    r_ranks = (0 if options.layout == "replicas" else 4) if options.r_ranks is None else options.r_ranks
    require_ranks(options.s_ranks, r_ranks)
    return options.s_ranks + options.prefill_ranks, r_ranks


def _devices(options: argparse.Namespace) -> tuple[Device, Device]:
    """Return the S device and the R device."""
    from hpcdecode.planning.hardware import device

    s, r = device(options.s_device), device(options.r_device)
    if options.node_memory is not None and r.memory_bytes is None:
        r = replace(r, memory_bytes=options.node_memory)
    return replace(s, in_a_node=max(options.node_devices // s.count, 1)), r
