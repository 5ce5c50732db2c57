"""The attentions and recurrences of one member of a group: the arguments of the calls over its own heads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.deal import EVERYONE, Dealt
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.mixers import recur_arguments
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.operators import ATTEND
from hpcdecode.model.frontend.ops import IN_CHUNKS, NO_MORE, OF_SCORES, PLAIN, AttendArguments
from hpcdecode.model.frontend.recurrent import CONV, CONV_RECUR
from hpcdecode.model.frontend.units import Ints

OwnPart = Callable[[fx.Node, Dealt], fx.Node]  # returns the node of the member's part of a tensor


def mixer_arguments(mixer: fx.Node, dealt: Dealt, member: int, own: OwnPart) -> list[Argument]:
    """Return the arguments of an attention or a recurrence over the member's own heads.

    Args:
        mixer: The call over all heads.
        dealt: How its result is dealt out.
        member: Number of the member.
        own: Returns the member's part of a tensor.
    """
    return (_attend if mixer.target is ATTEND else _recur)(mixer, dealt, member, own)


def _attend(node: fx.Node, dealt: Dealt, member: int, own: OwnPart) -> list[Argument]:
    call = AttendArguments.of(node)
    owners = dealt.owners.reshape(call.kv_heads, -1)[:, 0]
    kv_heads = int((owners == member).sum())
    q, k, v = (own(n, _of_heads(n, 1, owners)) for n in (call.q, call.k, call.v))
    sinks = None if call.sinks is None else own(call.sinks, _of_heads(call.sinks, 0, owners))
    made: list[Argument] = [q, k, v, call.q_heads * kv_heads // call.kv_heads, kv_heads, *node.args[5:8], sinks]
    if call.index_topk or call.compress_rate:
        everyone, dealt_rows = np.array([EVERYONE]), call.dealt_rows
        rows = [own(n, _of_heads(n, 1, owners if n in dealt_rows else everyone)) for n in call.index_rows]
        entry = None if call.entry is None else own(call.entry, _of_heads(call.entry, 1, everyone))
        made += [
            call.index_topk,
            kv_heads if dealt_rows else call.index_heads,
            call.index_dim,
            rows,
            False,
            call.compress_rate,
            entry,
            call.index_pool,
            call.index_local,
        ]
    elif call.chunked:
        made += IN_CHUNKS
    if call.profiles is not None or call.row_sinks:
        everyone = np.array([EVERYONE])
        profiles = None if call.profiles is None else own(call.profiles, _of_heads(call.profiles, 0, everyone))
        mixes, sinks = (None if n is None else own(n, _of_heads(n, 1, owners)) for n in (call.mixes, call.sink_rows))
        made += [*NO_MORE[len(made) - PLAIN : -OF_SCORES], profiles, mixes, call.row_sinks, sinks]
    return made


def _recur(node: fx.Node, dealt: Dealt, member: int, own: OwnPart) -> list[Argument]:
    call = recur_arguments(node)
    owners = dealt.owners.reshape(call.heads, -1)[:, 0]
    heads, of_heads = int((owners == member).sum()), Dealt(0, owners)
    v = _of_heads(call.v, 1, owners)
    if node.target is CONV:
        weight, bias = (None if n is None else own(as_node(n), Dealt(0, v.owners)) for n in node.args[1:3])
        return [own(call.v, v), weight, bias, node.args[3]]
    of_keys = _key_owners(owners, call.k_heads, member)
    q, k = (_of_heads(as_node(n), 1, of_keys) for n in (call.q, call.k))
    decay, beta = (None if n is None else own(n, _of_heads(n, 1, owners)) for n in (call.decay, call.beta))
    rate, skip = (None if n is None else own(n, of_heads) for n in (call.rate, call.skip))
    rows = [own(as_node(n), way) for n, way in zip(node.args[:3], (q, k, v), strict=True)]
    k_heads = int(((of_keys == member) | (of_keys == EVERYONE)).sum())
    made: list[Argument] = [*rows, decay, beta, rate, skip, heads, k_heads, *node.args[9:12]]
    if node.target is CONV_RECUR:
        ways = [Dealt(0, way.owners) for way in (q, k, v)]
        for each in (call.weights, call.biases):
            made.append([own(n, way) for n, way in zip(each, ways, strict=bool(each))])
        made.append(call.silu)
    return made


def _of_heads(n: fx.Node, dim: int, owners: Ints) -> Dealt:
    """Return how a tensor is dealt out whose columns along `dim` are those of heads with these owners."""
    return Dealt(dim, owners.repeat(tensor_meta(n).one_token[dim] // len(owners)))


def _key_owners(owners: Ints, k_heads: int, member: int) -> Ints:
    """Return the owner of each head of q and k: `member`, if that has value heads that it serves, or another.

    Args:
        owners: Owner of each value head, [heads].
        k_heads: Number of heads of q and k.
        member: Number of the member.
    """
    served = owners.reshape(k_heads, -1)
    own: Ints = np.where((served == member).any(1), member, served[:, 0])
    return own if (own != member).any() else np.full_like(own, EVERYONE)
