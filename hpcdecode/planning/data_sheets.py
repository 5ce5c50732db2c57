"""Costs of a model by the data sheets of devices: of one rank, or of a member of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hpcdecode.attention.shapes import MixerShape
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.group_shape import ONE, stage_shares
from hpcdecode.planning.hardware import (
    COMPUTE_EFFICIENCY,
    NODE_LATENCY,
    VECTOR_EFFICIENCY,
    Device,
    LinkSpeed,
)
from hpcdecode.planning.layer_work import (
    attend_flop,
    by_window,
    device_attend_flop,
    device_kv_bytes,
    device_score_bytes,
    device_state_bytes,
    indexed,
    key_bytes,
    most_chosen,
    of_member,
    on_kernels,
    read_bytes,
    score_flop,
    state_bytes_moved,
    state_flop,
    window_bytes,
    window_flop,
    wire_columns,
    without_indexers,
)
from hpcdecode.planning.model_size import ELEMENT_BYTES, ModelSize
from hpcdecode.planning.seen_tokens import ChosenTokens, WindowTokens
from hpcdecode.ranks.wishes import GroupShape

NO_LINK = LinkSpeed(float("inf"), 0.0)  # between ranks that have nothing to send
TOKEN_COUNTS = [1 << i for i in range(14)]  # at which data sheets are turned into seconds


def of_devices(
    size: ModelSize,
    s: Device,
    r: Device,
    link_bytes_per_second: float,
    message_latency_seconds: float,
    kv_dtype: str = "bfloat16",
    shape: GroupShape = ONE,
    kernels: bool = False,
) -> Cost:
    """Return the cost by data sheets.

    T(B) is by the device's curve of 2*A*B / FLOP/s and e*W(B) / (bytes/s), by default the longer: the linear part
    has 2*A*B FLOP and reads e*W(B) bytes of weights, where A = W(B) = N but for mixtures of experts; of weights in
    few bits it reads less (`read_bytes`). Lamina also counts e*B*d bytes of activations, which are left out here.
    `_r_seconds` has R, `_chosen_tokens` what indexers change. A pair of query and key takes 4*L*d FLOP (FluidInfer:
    4*l^2*d a layer for a prompt of l tokens), or those of attention over latents. A token on the wire takes (2 +
    2/G)*e*d bytes a layer (Lamina: 4*e*d, for G = 1), or the rows of other layers (`layer_work.wire_columns`).
    FLOP/s and bytes/s are the peaks times the shares of the curve; for attention they are times COMPUTE_EFFICIENCY
    and cache_share.

    A member of a group of `tp` S-ranks a stage has 1 / tp of the weights and heads, as its R-ranks have.

    Args:
        size: The model.
        s: Device of the S-rank, or several that split every layer.
        r: Device of one R-rank.
        link_bytes_per_second: In and out of the S-rank; infinite for no wire.
        message_latency_seconds: One message, one way.
        kv_dtype: Data type of the KV cache.
        shape: Of the group.
        kernels: Whether a GPU has kernels for all that R-ranks do, as those of other engines; ours have some.
    """
    tp, network = shape.tp, LinkSpeed(link_bytes_per_second, message_latency_seconds)
    within = _all_reduce_seconds_per_token(size, s.count, s.link_bytes_per_second)
    sums = 2 * size.layers * s.curve.sum_seconds * (s.count > 1)
    layers = of_member(size.shapes, tp)
    reads = _Reads(layers, kv_dtype, r, kernels=kernels or r.is_host)
    attention = _r_seconds(layers, kv_dtype, r, reads)
    return with_links(
        Cost(
            layers=size.layers,
            slice_tokens=TOKEN_COUNTS,
            slice_seconds=[
                _linear_seconds(
                    size.active_weights() / tp, size.read_bytes(tokens, expanded=not s.is_host) / tp, tokens, s
                )
                + within * tokens
                + sums
                for tokens in TOKEN_COUNTS
            ],
            logits_tokens=TOKEN_COUNTS,
            logits_seconds_at=[
                _linear_seconds(size.head_weights / tp, size.head_bytes / tp, tokens, s) for tokens in TOKEN_COUNTS
            ],
            attend_seconds_per_cached_token=attention.cached_token,
            attend_seconds_per_sequence=attention.sequence,
            prefill_seconds_per_pair=attend_flop(layers) / (s.flop_per_second * COMPUTE_EFFICIENCY),
            wire_seconds_per_token=ELEMENT_BYTES * wire_columns(layers) / link_bytes_per_second,
            message_latency_seconds=message_latency_seconds,
            append_seconds_per_prompt_token=attention.prompt_token,
            chosen=_chosen_tokens(layers, s, reads),
            windows=_window_tokens(layers, s, reads),
        ),
        size,
        shape,
        _between(s, network, tp),
        _between(s, network, shape.size),
    )


class _RSeconds(NamedTuple):
    """Seconds on an R-rank, all layers.

    Attributes:
        cached_token: A query and one cached token.
        sequence: A token of a sequence that decodes, beyond its cached tokens.
        prompt_token: A token of a prompt.
    """

    cached_token: float
    sequence: float
    prompt_token: float


class _Reads:
    """How long an R-rank takes for what it attends to: for bytes or for FLOP, whichever is longer.

    Attention reads K and V of a cached token once (FastDecode: the R-part is bound by memory); over latents its FLOP
    take longer. Torch's operations, which do what has no kernels, move more.

    Args:
        layers: All layers of the R-rank.
        kv_dtype: Data type of the KV cache.
        r: The R-rank.
        kernels: Whether it has kernels for all layers. GPUs have ours, or none.
    """

    def __init__(self, layers: Sequence[MixerShape], kv_dtype: str, r: Device, *, kernels: bool) -> None:
        self._kv_dtype, self.all_by_kernels = kv_dtype, kernels
        self._on_kernels = not kernels and on_kernels(layers, kv_dtype)
        self.flop_per_second = r.flop_per_second * COMPUTE_EFFICIENCY
        self.bytes_per_second = r.bytes_per_second * r.cache_share

    def token_seconds(self, layers: Sequence[MixerShape]) -> float:
        """Return what a query and a token that it attends to take at some of the layers."""
        if self.all_by_kernels:
            return self.longer(read_bytes(without_indexers(layers), self._kv_dtype), attend_flop(layers))
        moved = device_kv_bytes(layers, self._kv_dtype, kernels=self._on_kernels)
        return self.longer(moved, device_attend_flop(layers, kernels=self._on_kernels))

    def score_seconds(self, layers: Sequence[MixerShape]) -> float:
        """Return what the index scores of a query and a cached token take. Keys are read once for all index heads."""
        moved = key_bytes if self.all_by_kernels else device_score_bytes
        return self.longer(moved(layers, self._kv_dtype), score_flop(layers))

    def longer(self, nbytes: float, flop: float) -> float:
        """Return the seconds for bytes, or for FLOP."""
        return max(nbytes / self.bytes_per_second, flop / self.flop_per_second)


def _r_seconds(layers: Sequence[MixerShape], kv_dtype: str, r: Device, reads: _Reads) -> _RSeconds:
    """Return what R-rank `r` takes.

    A step reads and writes a sequence's states, whatever its length. The tokens of a prompt go through states that stay
    in cache or registers; torch's operations, which do what has no kernels, move them.
    """
    recurrence = state_flop(layers) / (r.vector_flop_per_second * VECTOR_EFFICIENCY)
    states, prompts = float(state_bytes_moved(layers)), 0.0
    if not reads.all_by_kernels:
        states, prompts = device_state_bytes(layers)
    return _RSeconds(
        reads.token_seconds(layers),
        max(states / reads.bytes_per_second, recurrence)
        + reads.longer(window_bytes(layers, kv_dtype), window_flop(layers)),
        max(prompts / reads.bytes_per_second, recurrence),
    )


def _window_tokens(layers: Sequence[MixerShape], s: Device, reads: _Reads) -> tuple[WindowTokens, ...]:
    """Return what windows save of attention, and of the FLOP of prompts."""
    s_flop = s.flop_per_second * COMPUTE_EFFICIENCY
    return tuple(
        WindowTokens(size, reads.token_seconds(own), attend_flop(own) / s_flop)
        for size, own in by_window(layers).items()
    )


def _chosen_tokens(layers: Sequence[MixerShape], s: Device, reads: _Reads) -> ChosenTokens | None:
    """Return what indexers save and take; None if no layer has the tokens chosen to which it attends.

    A layer that takes the choice of another has no scores. A chosen token is taken to cost what it costs where all are
    attended to.
    """
    choosing = indexed(layers)
    if not choosing:
        return None
    s_flop = s.flop_per_second * COMPUTE_EFFICIENCY
    return ChosenTokens(
        most=most_chosen(choosing),
        skipped_seconds_per_cached_token=reads.token_seconds(choosing),
        score_seconds_per_cached_token=reads.score_seconds(choosing),
        skipped_seconds_per_pair=attend_flop(choosing) / s_flop,
        score_seconds_per_pair=score_flop(choosing) / s_flop,
    )


def of_device_alone(
    size: ModelSize,
    device: Device,
    kv_dtype: str = "bfloat16",
    shape: GroupShape = ONE,
    network: LinkSpeed = NO_LINK,
) -> Cost:
    """Return the cost by data sheets of ranks of both roles: no wire, and one thing at a time.

    Args:
        size: The model.
        device: Holds weights and KV cache.
        kv_dtype: Data type of the KV cache.
        shape: Of the group.
        network: Between members on different nodes.
    """
    cost = of_devices(size, device, device, float("inf"), 0.0, kv_dtype, shape)
    cost = msgspec.structs.replace(cost, shared_core_fraction=1.0)
    sums, moves = (_between(device, network, members) for members in (shape.tp, shape.size))
    return with_links(cost, size, shape, sums, moves)


def with_links(cost: Cost, size: ModelSize, shape: GroupShape, sums: LinkSpeed, moves: LinkSpeed) -> Cost:
    """Return a member's cost with the sums of its stage, and with what stages hand on.

    Two sums a layer (Megatron-LM), each of e*d bytes a token, of which a member sends 2*(tp-1)/tp: the shares that
    others add up, and then its own sum. Each is two messages, one after the other. A stage hands on the residual of d
    columns and its heads of o; a copy in rotation hands on the residual, after every layer.

    Args:
        cost: Of the member, without any of these.
        size: The model.
        shape: Of the group.
        sums: Between the members of a stage.
        moves: Between stages.
    """
    return msgspec.structs.replace(
        cost,
        sum_seconds_per_token=_all_reduce_seconds_per_token(size, shape.tp, sums.bytes_per_second),
        sum_latency_seconds=2 * sums.latency_seconds if shape.tp > 1 else 0.0,
        stage_shares=stage_shares(size, shape.pp),
        move_seconds_per_token=_handed_on_bytes(size, shape) / moves.bytes_per_second,
        move_latency_seconds=moves.latency_seconds if shape.pp * shape.turns > 1 else 0.0,
        copies=shape.turns,
        prefill_ranks=shape.copies - shape.turns,
    )


def _between(s: Device, network: LinkSpeed, members: int) -> LinkSpeed:
    """Return the link between members: their own within a node, or the network."""
    if s.link_bytes_per_second and members <= s.in_a_node:
        return LinkSpeed(s.link_bytes_per_second, NODE_LATENCY)
    return network


def _handed_on_bytes(size: ModelSize, shape: GroupShape) -> float:
    """Return the bytes of a token that a stage hands on, or copies in rotation do; 0 if there is one of them."""
    if shape.turns > 1:
        return ELEMENT_BYTES * size.hidden * size.layers
    if shape.pp == 1:
        return 0.0
    return ELEMENT_BYTES * (size.hidden + size.o_columns / shape.tp)


def _linear_seconds(multiplied: float, read: float, tokens: int, s: Device) -> float:
    """Return T by the curve of 2*A*B / FLOP/s, of A weights multiplied, and bytes read / (bytes/s) (Lamina)."""
    return s.curve.seconds(2 * multiplied * tokens / s.flop_per_second, read / s.bytes_per_second)


def _all_reduce_seconds_per_token(size: ModelSize, count: int, bytes_per_second: float) -> float:
    """Return the seconds of two all-reduces a layer (Megatron-LM) among `count` devices that split every layer.

    Each sends 2*(n-1)/n of the e*d bytes of a token.
    """
    if count == 1:
        return 0.0
    return 4 * size.layers * (count - 1) / count * ELEMENT_BYTES * size.hidden / bytes_per_second
