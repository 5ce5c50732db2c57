"""The ranks of a cluster and what they cost, by data sheets or by a profile; which layouts they could have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost, of_device_alone, of_devices
from hpcdecode.planning.hardware import Device
from hpcdecode.planning.layouts import (
    PossibleLayout,
    RanksAlike,
    layouts_of_like,
    layouts_of_unlike,
    replicas,
    split,
)
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.profile import Profile
from hpcdecode.planning.serving import MEMORY
from hpcdecode.ranks.layout import POOLS

_NOBODY = RanksAlike("", 0, None, 0, 0)


class Network(NamedTuple):
    """What is between ranks.

    Attributes:
        bytes_per_second: In and out of a rank.
        latency_seconds: Of one message, one way.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Cluster:
    """Ranks, and what groups of them cost.

    Attributes:
        s: Ranks on S devices; none of them if all ranks are alike.
        r: Ranks on R devices, or all ranks.
        split_cost: Of an S-rank and its R-ranks; None if they cannot be split.
        refused: Why some layouts cannot be, as lines for the user.
    """

    s: RanksAlike
    r: RanksAlike
    split_cost: Cost | None
    refused: tuple[str, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether all ranks are alike, and any of them can be an S-rank."""
        return self.s.count == 0

    def layouts(self, layout: str, pools: Sequence[str] = POOLS) -> list[PossibleLayout]:
        """Return the layouts that the ranks could have.

        Args:
            layout: `replicas`, `split` or `auto` for both.
            pools: Kinds of pools of a split.

        Raises:
            UserError: If there are none.
        """
        cost = None if layout == "replicas" else self.split_cost
        if self.alike:
            found = list(layouts_of_like(self.r, cost, pools))
        else:
            found = list(layouts_of_unlike(self.s, self.r, cost, pools))
        if layout == "split":
            found = [one for one in found if one.family.startswith("split")]
        if not found:
            raise self._impossible(layout)
        return found

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
            if not count >= 1 or others < (count if pools == "own" else 1):
                raise UserError(
                    f"--layout split, pools {pools}: expected 1 or more S-ranks, and "
                    f"{'as many' if pools == 'own' else '1 or more'} R-ranks, got {count} and {others}"
                )
            found = split(self.split_cost, self.r.capacity, count, others, pools)
        if found is None:
            raise self._impossible(layout)
        return found

    def _impossible(self, layout: str) -> UserError:
        why = "; ".join(self.refused) or "there are too few ranks, or no room for a KV cache beside the weights"
        return UserError(f"--layout {layout}: expected ranks that can have it, got none: {why}")


def by_data_sheets(
    size: ModelSize, s: Device, s_count: int, r: Device, r_count: int, network: Network, width: float, kv_memory: int
) -> Cluster:
    """Return a cluster of S devices and R devices by their data sheets.

    A device with a memory of its own holds the weights, and as a replica its KV cache, in MEMORY of it. Other devices
    have `kv_memory` for a KV cache in either role, and memory for the weights beside it.

    Args:
        size: The model.
        s: The S device.
        s_count: How many there are; without any, all ranks are R devices, which are S-ranks as well.
        r: The R device.
        r_count: How many there are.
        network: Between them.
        width: Bytes of an element of the KV cache.
        kv_memory: Bytes of the KV cache of an R device.
    """
    token_bytes = size.kv_bytes_per_token(width)
    refused = []
    for device in dict.fromkeys([s] * bool(s_count) + [r] * bool(r_count and not s_count)):
        if not _holds(device, size):
            refused.append(_too_large(device, size))

    def kind(device: Device, count: int) -> RanksAlike:
        own = device.memory_bytes
        beside = kv_memory if own is None else MEMORY * own - size.weight_bytes
        alone = of_device_alone(size, device, width) if _holds(device, size) else None
        kv = kv_memory if own is None else MEMORY * own
        return RanksAlike(device.name, count, alone, int(kv / token_bytes), max(int(beside / token_bytes), 0))

    holder = s if s_count else r
    cost = of_devices(size, holder, r, network.bytes_per_second, network.latency_seconds, width)
    splits = cost if _holds(holder, size) and s_count + r_count > 1 and r_count else None
    return Cluster(kind(s, s_count), kind(r, r_count), splits, tuple(refused))


def by_profile(profile: Profile, ranks: int, capacity: int, size: ModelSize, network: Network) -> Cluster:
    """Return a cluster of ranks as a profile measured them.

    A profile of several ranks speaks of just these. One of a single process speaks of any number of machines like it,
    with a `network` between them.

    Args:
        profile: The profile.
        ranks: Number of ranks.
        capacity: KV tokens of a rank.
        size: The model.
        network: Between machines.
    """
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
    return Cluster(_NOBODY, RanksAlike("", ranks, profile.alone, capacity, capacity), cost, refused)


def _holds(device: Device, size: ModelSize) -> bool:
    """Return whether a device holds the weights; one without a memory of its own is taken to."""
    return device.memory_bytes is None or size.weight_bytes <= MEMORY * device.memory_bytes


def _too_large(device: Device, size: ModelSize) -> str:
    """Return what is missing for the weights to fit, as a line for the user."""
    assert device.memory_bytes is not None, "a device without a memory of its own holds any weights"
    one, kind = device.memory_bytes / device.count, device.name.removeprefix(f"{device.count}x")
    need = -(-size.weight_bytes // (MEMORY * one))
    return (
        f"{size.weight_bytes / 1e9:,.1f} GB of weights do not fit into {MEMORY:.0%} of the "
        f"{device.memory_bytes / 1e9:,.0f} GB of {device.name}: needed is one with "
        f"{size.weight_bytes / MEMORY / 1e9:,.0f} GB, or {need:.0f} that split every layer, which jobs cannot do yet "
        f"(forecast: --s-device {need:.0f}x{kind})"
    )
