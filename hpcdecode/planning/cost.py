"""Seconds of a decode step: the S-part by tokens, the R-part by cached tokens, the wire by bytes.

Symbols are those of the papers:

| symbol | meaning |
|---|---|
| B | tokens of a step, one of each sequence that decodes |
| N | weights of all layers |
| L, d | layers, columns of q in a layer |
| G | query heads for each KV head |
| e | bytes of an element |
| S, F | decode steps of a sequence, steps between two micro-batches |
| T(B) | seconds of the S-part of B tokens, all layers |
| R | seconds in which an R-rank attends to one cached token, all layers |

References:
    FastDecode: He and Zhai 2024, arXiv:2403.11421. S-part, R-part, T(B), R, and the steady state (`planner`).
    Lamina: Chen et al. 2024, arXiv:2405.01814. FLOP and bytes of the linear part, bytes of the wire.
    FluidInfer: Xiao. FLOP of the attention of prompts, bytes of swapped K and V (`serving`).
    Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053. Two all-reduces a layer under tensor parallelism.

What has no reference here is this project's own, checked against jobs by `hpcdecode bench planner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.planning.hardware import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, Device
from hpcdecode.planning.model_size import ELEMENT_BYTES, ModelSize

OfRRanks = NDArray[np.float64] | NDArray[np.int64]  # a number of every R-rank, [R-ranks]
TOKEN_COUNTS = [1 << i for i in range(14)]  # at which data sheets are turned into seconds


class Cost(msgspec.Struct, frozen=True):
    """What a model costs on its ranks, in seconds; profiles on disk keep the short names.

    Attributes:
        layers: L.
        slice_tokens: Token counts of `slice_seconds`, ascending.
        slice_seconds: T(B) (FastDecode): all slices of one lane step, with the work of the S-rank that goes with them.
        logits_tokens: Sampled tokens of `logits_seconds_at`, ascending.
        logits_seconds_at: Logits, sampling and planning of one lane step.
        attend_seconds_per_cached_token: R (FastDecode): one R-rank, all layers.
        attend_seconds_per_sequence: One R-rank, all layers, beyond the cached tokens.
        prefill_seconds_per_pair: Attention of one query and one key of a prompt, all layers, on the S-rank.
        wire_seconds_per_token: q, k, v there and o back, all layers.
        message_latency_seconds: One message, one way.
        prefill_seconds_per_step: Added to a lane step that carries prompt tokens.
        attend_seconds_per_step: Added to a lane step on every R-rank.
        append_seconds_per_prompt_token: K and V of a prompt token, all layers, on its R-rank.
        shared_core_fraction: Part of the sum of all ranks' seconds that ranks on shared cores cannot overlap. It is 0
            for ranks with cores of their own, and 1 for one process.
    """

    layers: int
    slice_tokens: list[int] = msgspec.field(name="tokens")
    slice_seconds: list[float] = msgspec.field(name="body")
    logits_tokens: list[int] = msgspec.field(name="drawn")
    logits_seconds_at: list[float] = msgspec.field(name="logits")
    attend_seconds_per_cached_token: float = msgspec.field(name="attend")
    attend_seconds_per_sequence: float = msgspec.field(name="row")
    prefill_seconds_per_pair: float = msgspec.field(name="prefill")
    wire_seconds_per_token: float = msgspec.field(name="wire")
    message_latency_seconds: float = msgspec.field(name="latency")
    prefill_seconds_per_step: float = msgspec.field(default=0.0, name="chunk")
    attend_seconds_per_step: float = msgspec.field(default=0.0, name="begin")
    append_seconds_per_prompt_token: float = msgspec.field(default=0.0, name="append")
    shared_core_fraction: float = msgspec.field(default=0.0, name="shared")

    def body_seconds(self, tokens: float) -> float:
        """Return T(B), the seconds of all slices of one lane step (FastDecode)."""
        return _interpolated(self.slice_tokens, self.slice_seconds, tokens)

    def logits_seconds(self, sampled_tokens: float) -> float:
        """Return the seconds of the logits of one lane step, and of the sampling and planning that go with them."""
        return _interpolated(self.logits_tokens, self.logits_seconds_at, sampled_tokens)

    def lane_seconds(
        self,
        tokens: float,
        prompt_tokens: float,
        pairs: float,
        cached_tokens: OfRRanks,
        sequences: OfRRanks,
    ) -> LaneSeconds:
        """Return what one lane needs in a step, over all layers.

        S-rank: T(B) + prefill_seconds_per_pair * pairs + prefill_seconds_per_step, the last with prompts only.
        R-rank i: R * cached_tokens[i] + attend_seconds_per_sequence * sequences[i] + attend_seconds_per_step
        + append_seconds_per_prompt_token * its even share of the prompt tokens.
        Wire: wire_seconds_per_token * B. Latency: two messages a layer, one there and one back.

        Args:
            tokens: B, prompt tokens included.
            prompt_tokens: Those of prompts among them.
            pairs: Queries of prompts times the keys that each attends to.
            cached_tokens: Tokens that each R-rank attends to, [R-ranks].
            sequences: Sequences that each R-rank attends to, [R-ranks].
        """
        active = 1.0 if tokens else 0.0
        prefill = self.prefill_seconds_per_pair * pairs + self.prefill_seconds_per_step * min(prompt_tokens, 1.0)
        attend = (
            self.attend_seconds_per_cached_token * cached_tokens
            + self.attend_seconds_per_sequence * sequences
            + self.append_seconds_per_prompt_token * prompt_tokens / len(cached_tokens)
            + self.attend_seconds_per_step * active
        )
        return LaneSeconds(
            s_rank=self.body_seconds(tokens) + prefill,
            r_ranks=attend,
            wire=self.wire_seconds_per_token * tokens,
            latency=2 * self.layers * self.message_latency_seconds * active,
        )


class LaneSeconds(msgspec.Struct, frozen=True):
    """Seconds of one lane step over all layers.

    Attributes:
        s_rank: On the S-rank.
        r_ranks: On each R-rank, [R-ranks].
        wire: On the wire, both ways.
        latency: Of the messages, in which nothing is used.
    """

    s_rank: float
    r_ranks: NDArray[np.float64]
    wire: float
    latency: float


def step_seconds(groups: Sequence[Sequence[LaneSeconds]], shared_core_fraction: float = 0.0, alike: int = 1) -> float:
    """Return the seconds of one step of groups on the same R-ranks, without their logits.

    The lanes of a group take turns on the same ranks, as the two mini-batches of FastDecode do. Groups take turns on
    R-ranks that they share (`--pools shared`), and step together. So a step takes the longest of:

    1. an S-rank: sum of s over the lanes of its group;
    2. the busiest R-rank i: sum of r[i] over the lanes of all groups;
    3. shared cores: shared_core_fraction * (sum of s + sum of r over all lanes and R-ranks);
    4. the wire: sum of wire over the lanes of a group at its S-rank, 1 / R-ranks of that of all groups at an R-rank;
    5. the longest way of one lane: s + wire + latency + max(max r, shared_core_fraction * sum r).

    Args:
        groups: What every lane needs, by group; at least one lane each.
        shared_core_fraction: As of `Cost`.
        alike: How often each of these groups is there.
    """
    s_ranks = [sum(lane.s_rank for lane in lanes) for lanes in groups]
    wires = [sum(lane.wire for lane in lanes) for lanes in groups]
    r_ranks = alike * r_rank_seconds(groups)
    return max(
        *s_ranks,
        float(r_ranks.max()),
        shared_core_fraction * (alike * sum(s_ranks) + float(r_ranks.sum())),
        *wires,
        alike * sum(wires) / len(r_ranks),
        *(_round_trip_seconds(lane, shared_core_fraction) for lanes in groups for lane in lanes),
    )


def r_rank_seconds(groups: Sequence[Sequence[LaneSeconds]]) -> NDArray[np.float64]:
    """Return the seconds of every R-rank, all lanes of all groups together, [R-ranks]."""
    seconds: NDArray[np.float64] = reduce(add, (lane.r_ranks for lanes in groups for lane in lanes))
    return seconds


def _round_trip_seconds(lane: LaneSeconds, shared_core_fraction: float) -> float:
    """Return term 5 of `step_seconds` for one lane."""
    attend = max(float(lane.r_ranks.max()), shared_core_fraction * float(lane.r_ranks.sum()))
    return lane.s_rank + lane.wire + lane.latency + attend


def of_devices(
    size: ModelSize,
    s: Device,
    r: Device,
    link_bytes_per_second: float,
    message_latency_seconds: float,
    kv_element_bytes: float = ELEMENT_BYTES,
) -> Cost:
    """Return the cost by data sheets.

    T(B) = max(2*N*B / FLOP/s, e*N / (bytes/s)): the linear part has 2*N*B FLOP and reads e*N bytes of weights. Lamina
    also counts e*B*d bytes of activations, which are left out here.
    R = kv_bytes_per_token / (bytes/s): attention reads K and V once (FastDecode: the R-part is bound by memory).
    A pair of query and key takes 4*L*d FLOP (FluidInfer: 4*l^2*d a layer for a prompt of l tokens).
    A token on the wire takes (2 + 2/G)*e*d bytes a layer (Lamina: 4*e*d, for G = 1).
    FLOP/s and bytes/s are the peaks times COMPUTE_EFFICIENCY and BANDWIDTH_EFFICIENCY.

    Args:
        size: The model.
        s: Device of the S-rank, or several that split every layer.
        r: Device of one R-rank.
        link_bytes_per_second: In and out of the S-rank; infinite for no wire.
        message_latency_seconds: One message, one way.
        kv_element_bytes: Bytes of an element of the KV cache.
    """
    flop_per_second = s.flop_per_second * COMPUTE_EFFICIENCY
    all_reduce = _all_reduce_seconds_per_token(size, s)
    return Cost(
        layers=size.layers,
        slice_tokens=TOKEN_COUNTS,
        slice_seconds=[
            seconds + all_reduce * tokens
            for seconds, tokens in zip(_linear_seconds(size.layer_weights, s), TOKEN_COUNTS, strict=True)
        ],
        logits_tokens=TOKEN_COUNTS,
        logits_seconds_at=_linear_seconds(size.head_weights, s),
        attend_seconds_per_cached_token=size.kv_bytes_per_token(kv_element_bytes)
        / (r.bytes_per_second * BANDWIDTH_EFFICIENCY),
        attend_seconds_per_sequence=0.0,
        prefill_seconds_per_pair=4 * size.q_columns * size.layers / flop_per_second,
        wire_seconds_per_token=size.wire_bytes_per_token / link_bytes_per_second,
        message_latency_seconds=message_latency_seconds,
    )


def of_device_alone(size: ModelSize, device: Device, kv_element_bytes: float = ELEMENT_BYTES) -> Cost:
    """Return the cost by data sheets of a rank of both roles: no wire, and one thing at a time.

    Args:
        size: The model.
        device: Holds weights and KV cache.
        kv_element_bytes: Bytes of an element of the KV cache.
    """
    cost = of_devices(size, device, device, float("inf"), 0.0, kv_element_bytes)
    return msgspec.structs.replace(cost, shared_core_fraction=1.0)


def _linear_seconds(weights: int, s: Device) -> list[float]:
    """Return max(2*N*B / FLOP/s, e*N / (bytes/s)) at TOKEN_COUNTS (Lamina, the linear part)."""
    flop_per_second = s.flop_per_second * COMPUTE_EFFICIENCY
    bytes_per_second = s.bytes_per_second * BANDWIDTH_EFFICIENCY
    read = ELEMENT_BYTES * weights / bytes_per_second
    return [max(2 * weights * tokens / flop_per_second, read) for tokens in TOKEN_COUNTS]


def _all_reduce_seconds_per_token(size: ModelSize, s: Device) -> float:
    """Return the seconds of two ring all-reduces a layer (Megatron-LM) among n devices that split every layer.

    A ring sends 2*(n-1)/n of the e*d bytes of a token over each link.
    """
    if s.count == 1:
        return 0.0
    return 4 * size.layers * (s.count - 1) / s.count * ELEMENT_BYTES * size.q_columns / s.link_bytes_per_second


def _interpolated(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """Return the seconds at `size`, linear between the sizes and beyond the last; 0 for no tokens."""
    if not size:
        return 0.0
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, seconds))
    return seconds[-1] + (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) * (size - sizes[-1])
