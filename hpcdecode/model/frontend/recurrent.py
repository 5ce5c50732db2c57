"""The operators that stand for layers that keep a state of fixed size: causal convolutions and linear recurrences.

A head has a state S of k_dim rows of v_dim elements. A token with query q, key k and value v changes and reads it:

    S = exp(decay) * S;  e = beta * (v - S^T k if delta else v);  S = S + k e^T;  o = S^T q + skip * v

The gated delta rule (Gated DeltaNet, KDA), Mamba-2 (q = C, k = B, beta = dt) and Mamba (a head a channel) are of this
form. A causal convolution of few taps often comes before it.

A compressor (DeepSeek-V4, section 2.3) keeps a state, too: of each channel the mean of the values of the last tokens,
weighted by the softmax of their gates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.nodes import as_float, as_int, as_node, as_nodes

CONV_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor"
RECUR_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? rate, Tensor? skip, int heads, int k_heads, "
    "bool delta, bool normalised, float scale) -> Tensor"
)
COMPRESS_SCHEMA = "(Tensor values, Tensor gates, int rate, bool overlaps) -> Tensor"
CONV_RECUR_SCHEMA = RECUR_SCHEMA.replace(") ->", ", Tensor[] weights, Tensor[] biases, bool silu) ->")


@functools.cache
def define_recurrent() -> None:
    """Define `hpcdecode::causal_conv`, `recur`, `conv_recur` and `compress` for torch, once."""
    defined: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "causal_conv": (CONV_SCHEMA, _like_x),
        "recur": (RECUR_SCHEMA, _like_v),
        "conv_recur": (CONV_RECUR_SCHEMA, _like_v),
        "compress": (COMPRESS_SCHEMA, _of_channels),
    }
    for name, (schema, fake) in defined.items():
        operator = torch.library.custom_op(f"hpcdecode::{name}", _run_elsewhere, mutates_args=(), schema=schema)
        operator.register_fake(fake)


def _run_elsewhere(*_: object) -> Tensor:
    raise NotImplementedError("a recurrence marks where a traced model is cut; it is never run")


def _like_x(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _like_v(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(v.shape)


def _of_channels(values: Tensor, gates: Tensor, rate: int, overlaps: bool) -> Tensor:
    return values.new_empty(values.shape[0], values.shape[1] // (1 + overlaps))


define_recurrent()
CONV = torch.ops.hpcdecode.causal_conv.default
RECUR = torch.ops.hpcdecode.recur.default
CONV_RECUR = torch.ops.hpcdecode.conv_recur.default
COMPRESS = torch.ops.hpcdecode.compress.default
RECURRENT = frozenset({CONV, RECUR, CONV_RECUR, COMPRESS})


class RecurArguments(NamedTuple):
    """Arguments of a recurrence, of one alone or of a convolution alone too, or of a compressor.

    Attributes:
        q: Queries, [T, k_heads * k_dim]; None for a convolution alone and for a compressor.
        k: Keys, as q.
        v: Values, [T, heads * v_dim], or the input of a convolution alone.
        decay: Log decays, float32 [T, heads] or [T, heads * k_dim], or the gates of a compressor's values; None if
            `rate` is given or there is no state.
        beta: Factor of what is written, float32 [T, heads], or None.
        rate: Log decay per unit of beta, float32 [heads] or [heads, k_dim], or None.
        skip: Factor of v that is added to the output, [heads], or None.
        heads: Number of values' heads; the channels of a convolution alone.
        k_heads: Number of heads of q and k.
        delta: Whether what the state says of k is taken from v before it is written.
        normalised: Whether q and k are divided by their norms, head by head.
        scale: Factor of q.
        weights: Weights [channels, taps] of the convolution of q, k and v, or of v alone; none if there is none.
        biases: Its biases [channels], as `weights`; none if it has none.
        silu: Whether SiLU is applied to its result.
        compress_rate: Tokens of a window of a compressor; 0 for none.
        overlaps: Whether its windows overlap, see `RecurrentShape`.
    """

    q: fx.Node | None
    k: fx.Node | None
    v: fx.Node
    decay: fx.Node | None
    beta: fx.Node | None
    rate: fx.Node | None
    skip: fx.Node | None
    heads: int
    k_heads: int
    delta: bool
    normalised: bool
    scale: float
    weights: list[fx.Node]
    biases: list[fx.Node]
    silu: bool
    compress_rate: int = 0
    overlaps: bool = False

    @classmethod
    def of(cls, node: fx.Node, channels: int) -> RecurArguments:
        """Return the arguments of the call `node`; channels: columns of its result."""
        if node.target is CONV:
            return cls._of_convolution(node, channels)
        if node.target is COMPRESS:
            values, gates, rate, overlaps = node.args
            alone = cls._alone(values, channels)
            return alone._replace(decay=as_node(gates), compress_rate=as_int(rate), overlaps=bool(overlaps))
        q, k, v, decay, beta, rate, skip = map(_optional, node.args[:7])
        heads, k_heads, delta, normalised, scale = node.args[7:12]
        weights, biases, silu = node.args[12:] if node.target is CONV_RECUR else ([], [], False)
        return cls(
            q=q,
            k=k,
            v=as_node(v),
            decay=decay,
            beta=beta,
            rate=rate,
            skip=skip,
            heads=as_int(heads),
            k_heads=as_int(k_heads),
            delta=bool(delta),
            normalised=bool(normalised),
            scale=as_float(scale),
            weights=as_nodes(weights),
            biases=as_nodes(biases),
            silu=bool(silu),
        )

    @classmethod
    def _of_convolution(cls, node: fx.Node, channels: int) -> RecurArguments:
        """Return the arguments of a convolution alone: every channel is a head."""
        x, weight, bias, silu = node.args
        biases = [] if bias is None else [as_node(bias)]
        return cls._alone(x, channels)._replace(weights=[as_node(weight)], biases=biases, silu=bool(silu))

    @classmethod
    def _alone(cls, x: Argument, channels: int) -> RecurArguments:
        """Return the arguments of what takes `x`, every channel of which is a head, and nothing else."""
        return cls(
            q=None,
            k=None,
            v=as_node(x),
            decay=None,
            beta=None,
            rate=None,
            skip=None,
            heads=channels,
            k_heads=channels,
            delta=False,
            normalised=False,
            scale=1.0,
            weights=[],
            biases=[],
            silu=False,
        )

    @property
    def rows(self) -> list[fx.Node]:
        """Return the tensors of which every token brings a row."""
        return [n for n in (self.q, self.k, self.v, self.decay, self.beta) if n is not None]

    def shares_keys(self, members: int) -> bool:
        """Return whether heads of q and k serve value heads of several of `members`, which then all compute them."""
        return self.q is not None and self.k_heads % members != 0

    def units(self, members: int) -> int | None:
        """Return the number of units that are dealt out evenly, or None if members cannot have equally many heads.

        A unit is a head of q and k with the value heads that it serves; a value head, if members share heads of q and
        k; or a channel of a convolution alone. A compressor has none: all heads attend to its entries.
        """
        if self.heads % members or self.compress_rate:
            return None
        if self.q is not None and self.k_heads % members == 0:
            return self.k_heads
        return self.heads if self.q is None or members % self.k_heads == 0 else None


def _optional(argument: Argument) -> fx.Node | None:
    return None if argument is None else as_node(argument)
