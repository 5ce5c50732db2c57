"""The layers at which a trace is cut: shapes, what tokens bring to them, and weights of those that keep states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.shapes import IndexerShape, LayerShape, MixerShape, PositionBias
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.mixers import recur_arguments
from hpcdecode.model.frontend.operators import ATTEND
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.trace import Trace


class SliceOutput(NamedTuple):
    """What a slice returns for T tokens.

    Attributes:
        rows: What each token brings to the layer, in the model's dtype and possibly strided: queries [T, q_heads *
            k_dim], keys [T, kv_heads * k_dim] and values [T, kv_heads * v_dim] to attention; the parts of a row of
            `RecurrentShape` to a layer that keeps a state.
        context: Tensors that the next slice takes.
    """

    rows: tuple[Tensor, ...]
    context: tuple[Tensor, ...]


def layer_shapes(trace: Trace) -> tuple[MixerShape, ...]:
    """Return the shapes of a trace's attentions and recurrences, in order."""
    return tuple(layer_shape(node, trace.dtype) for node in trace.attends)


def layer_shape(mixer: fx.Node, dtype: torch.dtype) -> MixerShape:
    """Return the shape of an attention or a recurrence; dtype: of activations."""
    return _attention(mixer) if mixer.target is ATTEND else _recurrence(mixer, dtype.itemsize)


def _attention(node: fx.Node) -> LayerShape:
    call = AttendArguments.of(node)
    k_columns = (_columns(call.k) - call.index_dim) // (2 if call.compress_rate else 1)
    k_dim, v_dim = k_columns // call.kv_heads, _columns(node) // call.q_heads
    about = call.scale, call.window, call.softcap, call.sinks is not None
    choice = call.index_topk, call.index_heads, call.index_dim, call.index_pool, call.index_local
    indexer = IndexerShape(*choice) if call.index_topk else None
    bias = None
    if call.profiles is not None:
        dim, extent = map(int, tensor_meta(call.profiles).shape)
        bias = PositionBias(dim, extent)
    more = _columns(call.v) == 0, indexer, call.chunked, call.compress_rate
    return LayerShape(call.kv_heads, k_dim, v_dim, call.q_heads, *about, *more, bias=bias, row_sinks=call.row_sinks)


def with_weights(shape: MixerShape, mixer: fx.Node, value: Callable[[fx.Node], Tensor]) -> MixerShape:
    """Return a layer's shape with the weights that are part of it; value: returns the value of a static node."""
    if not isinstance(shape, LayerShape) or shape.bias is None:
        return shape
    profiles = AttendArguments.of(mixer).profiles
    assert profiles is not None, "a layer with biases has profiles"
    found = value(profiles).to("cpu", torch.float32).contiguous().numpy().tobytes()
    return replace(shape, bias=replace(shape.bias, profiles=found))


def _recurrence(node: fx.Node, element_bytes: int) -> RecurrentShape:
    call = recur_arguments(node)
    log_decays = call.decay or call.rate
    return RecurrentShape(
        heads=call.heads,
        k_heads=call.k_heads,
        k_dim=0 if call.k is None else _columns(call.k) // call.k_heads,
        v_dim=_columns(call.v) // call.heads // (1 + call.overlaps),
        taps=tensor_meta(call.weights[0]).one_token[-1] if call.weights else 0,
        silu=call.silu,
        delta=call.delta,
        normalised=call.normalised,
        scale=call.scale,
        decay_dim=1 if log_decays is None or call.k is None else tensor_meta(log_decays).numel_per_token // call.heads,
        has_beta=call.beta is not None,
        has_rate=call.rate is not None,
        element_bytes=element_bytes,
        compress_rate=call.compress_rate,
        overlaps=call.overlaps,
    )


def _columns(node: fx.Node) -> int:
    return tensor_meta(node).one_token[-1]


def recurrent_weights(node: fx.Node, value: Callable[[fx.Node], Tensor]) -> RecurrentWeights:
    """Return the weights of a recurrence that its R-ranks need; value: returns the value of a static node."""
    call = recur_arguments(node)

    def joined(nodes: Sequence[fx.Node]) -> Tensor | None:
        found = [value(n).to("cpu", torch.float32) for n in nodes]
        return torch.cat(found).contiguous() if found else None

    rate, skip = (None if n is None else joined([n]) for n in (call.rate, call.skip))
    return RecurrentWeights(joined(call.weights), joined(call.biases), None if rate is None else rate.flatten(), skip)
