"""The ranks of a cluster and what they cost, by data sheets or by a profile; which layouts they could have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from hpcdecode.engine.setup import check_kv_dtype
from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_device_alone, of_devices
from hpcdecode.planning.group_shape import ONE, held_on, member_bytes, member_unit, smallest, why_not
from hpcdecode.planning.hardware import MEMORY, Device, LinkSpeed
from hpcdecode.planning.layer_work import on_kernels
from hpcdecode.planning.layouts import (
    MemberWeights,
    PossibleLayout,
    RanksAlike,
    layouts_of_like,
    layouts_of_unlike,
    replicas,
    split,
)
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.profile import Profile
from hpcdecode.ranks.wishes import POOLS, GroupShape


@dataclass(frozen=True)
class Cluster:
    """Ranks, and what groups of them cost.

    Attributes:
        s: Ranks on S devices; none of them if all ranks are alike.
        r: Ranks on R devices, or all ranks.
        split_cost: Of a group and its R-ranks; None if they cannot be split.
        refused: Why some layouts cannot be, as lines for the user.
        shape: Members of a group.
    """

    s: RanksAlike
    r: RanksAlike
    split_cost: Cost | None
    refused: tuple[str, ...] = ()
    shape: GroupShape = ONE

    @property
    def alike(self) -> bool:
        """Whether all ranks are alike, and any of them can be an S-rank."""
        return self.s.count == 0

    def layouts(self, layout: str, pools: Sequence[str] = POOLS) -> list[PossibleLayout]:
        """Return the layouts that the ranks could have.

        Args:
            layout: `replicas`, `split` or `auto` for both.
            pools: Kinds of pools of a split.
        """
        cost = None if layout == "replicas" else self.split_cost
        if self.alike:
            found = list(layouts_of_like(self.r, cost, pools))
        else:
            found = list(layouts_of_unlike(self.s, self.r, cost, pools))
        return [one for one in found if layout != "split" or one.family.startswith("split")]

    def layout(self, layout: str, s_ranks: int, pools: str) -> PossibleLayout:
        """Return the one layout that takes all ranks.

        Args:
            layout: `replicas` or `split`.
            s_ranks: Of a split of ranks that are alike.
            pools: Of a split.

        Raises:
            UserError: If the ranks cannot have it.
        """
        found = None
        if layout == "replicas":
            found = replicas(self.s, self.r) if not self.alike else replicas(self.r)
        elif self.split_cost is not None:
            count = s_ranks if self.alike else self.s.count
            others = self.r.count - s_ranks if self.alike else self.r.count
            members, parts = self.shape.size, self.shape.parts
            if not count >= members or others < (count if pools == "own" else parts):
                raise UserError(
                    f"--layout split, pools {pools}: expected {members} or more S-ranks, and "
                    f"{'as many' if pools == 'own' else f'{parts} or more'} R-ranks, got {count} and {others}"
                )
            if count % members or others % parts:
                raise UserError(
                    f"{self.shape.flags}: expected multiples of {members} S-ranks and of {parts} R-ranks, got {count} "
                    f"and {others}"
                )
            weights = self.r.weights if self.alike else self.s.weights
            found = split(self.split_cost, self.r.capacity, count, others, pools, self.shape, self.r.unit, weights)
        if found is None:
            raise impossible(layout, self.refused)
        return found


def impossible(layout: str, refused: Sequence[str]) -> UserError:
    """Return the error of ranks that cannot have a layout, for reasons that are known or not."""
    why = "; ".join(refused) or "there are too few ranks, or no room for a KV cache beside the weights"
    return UserError(f"--layout {layout}: expected ranks that can have it, got none: {why}")


def by_data_sheets(
    size: ModelSize,
    s: Device,
    s_count: int,
    r: Device,
    r_count: int,
    network: LinkSpeed,
    kv_dtype: str,
    kv_memory: int,
    shape: GroupShape = ONE,
) -> Cluster:
    """Return a cluster of S devices and R devices by their data sheets.

    A device with a memory of its own holds the weights, and as a replica its KV cache, in MEMORY of it. Other devices
    have `kv_memory` for a KV cache in either role, and memory for the weights beside it. Weights in few bits may be in
    bfloat16 on GPUs (`held_on`).

    Args:
        size: The model.
        s: The S device.
        s_count: How many there are; without any, all ranks are R devices, which are S-ranks as well.
        r: The R device.
        r_count: How many there are.
        network: Between them.
        kv_dtype: Data type of the KV cache.
        kv_memory: Bytes of the KV cache of an R device.
        shape: Members of a group.

    Raises:
        UserError: If the model cannot be shared by such a group, or be kept as `kv_dtype`.
    """
    if (why := why_not(size, shape)) is not None:
        raise UserError(why)
    check_kv_dtype(kv_dtype, size.shapes)
    devices = dict.fromkeys([s] * bool(s_count) + [r] * bool(r_count))
    holder = s if s_count else r

    def fits(device: Device) -> bool:
        return member_bytes(size, shape) <= device.room

    refused = [_too_large(device, size, shape) for device in devices if device == holder and not fits(device)]

    def kind(device: Device, count: int) -> RanksAlike:
        if not count:
            return RanksAlike(device.name, 0, None, 0, 0, shape)
        windowed = device.is_host or on_kernels(size.shapes, kv_dtype)
        unit, own = member_unit(size, shape, kv_dtype, windowed), held_on(size, device, shape)
        weights = MemberWeights(member_bytes(own, shape), own.weight_bytes)
        kv = kv_memory if device.memory_bytes is None else device.room
        beside = kv if device.memory_bytes is None else kv - weights.member
        both = shape.copies == 1 and fits(device)
        alone = of_device_alone(own, device, kv_dtype, shape, network) if both else None
        return RanksAlike(device.name, count, alone, unit.capacity(kv), unit.capacity(beside), shape, unit, weights)

    cost = None
    if fits(holder) and s_count + r_count > 1 and r_count:
        own = held_on(size, holder, shape)
        cost = of_devices(own, holder, r, network.bytes_per_second, network.latency_seconds, kv_dtype, shape)
    return Cluster(kind(s, s_count), kind(r, r_count), cost, tuple(refused), shape)


def by_profile(
    profile: Profile, ranks: int, kv_memory: int, size: ModelSize, network: LinkSpeed, shape: GroupShape = ONE
) -> Cluster:
    """Return a cluster of ranks as a profile measured them.

    A profile of several ranks speaks of just these. One of a single process speaks of any number of machines like it,
    with a `network` between them.

    Args:
        profile: The profile.
        ranks: Number of ranks.
        kv_memory: Bytes of the KV cache of a rank.
        size: The model.
        network: Between machines.
        shape: Members of a group.

    Raises:
        UserError: If the profile does not speak of such groups.
    """
    if shape.pp * shape.copies > 1 or shape.tp not in profile.tensor_parallel:
        counts = ", ".join(map(str, profile.tensor_parallel))
        raise UserError(
            f"{shape.flags}: expected one stage and one of --tp {counts}, whose sums the profile has measured; "
            "calibrate on a multiple of as many ranks, or leave --profile out"
        )
    if (why := why_not(size, shape)) is not None:
        raise UserError(why)
    cost: Cost | None = profile.cost
    if profile.ranks == 1:
        cost = (
            None
            if ranks == 1
            else replace(
                profile.cost,
                wire_seconds_per_token=size.wire_bytes_per_token / network.bytes_per_second,
                message_latency_seconds=network.latency_seconds,
                shared_core_fraction=0.0,
            )
        )
    refused = () if profile.alone else ("the profile has no replicas; calibrate again",)
    unit = member_unit(size, shape, profile.kv_dtype, windowed=True)
    alone, tokens = profile.alone and profile.of_member(profile.alone, shape.tp), unit.capacity(kv_memory)
    split_cost = cost and profile.of_member(cost, shape.tp)
    weights = MemberWeights(member_bytes(size, shape), size.weight_bytes)
    nobody = RanksAlike("", 0, None, 0, 0, shape)
    everybody = RanksAlike("", ranks, alone, tokens, tokens, shape, unit, weights)
    return Cluster(nobody, everybody, split_cost, refused, shape)


def _too_large(device: Device, size: ModelSize, shape: GroupShape) -> str:
    """Return what is missing for a member's weights to fit, as a line for the user."""
    assert device.memory_bytes is not None, "a device without a memory of its own holds any weights"
    own, least = member_bytes(size, shape), smallest(size, device.room)
    shares = f" with {shape.flags}" * (shape.size > 1)
    needs = f"one with {own / MEMORY / 1e9:,.0f} GB"
    if least is not None:
        needs += f", or {least.size} with {least.flags} ({member_bytes(size, least) / 1e9:,.1f} GB each)"
    return (
        f"{own / 1e9:,.1f} GB of weights{shares} do not fit into {MEMORY:.0%} of the "
        f"{device.memory_bytes / 1e9:,.0f} GB of {device.name}: needs {needs}"
    )
