"""Let attention take what tokens bring beside q, k and v as columns of q and k, or do without indexers.

These are the rows of its indexer, compressed entries, numbers that mix biases, and sinks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from msgspec.structs import replace as changed
from torch import fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.clean import remove_dead
from hpcdecode.model.frontend.meta import TOKENS, Meta, tensor_meta
from hpcdecode.model.frontend.operators import ATTEND
from hpcdecode.model.frontend.ops import NO_MORE, OF_SCORES, PLAIN, AttendArguments
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten


def has_indexers(trace: Trace) -> bool:
    """Return whether indexers choose tokens for attentions of a trace."""
    return any(n.target is ATTEND and AttendArguments.of(n).index_topk for n in trace.attends)


def has_entries(trace: Trace) -> bool:
    """Return whether attentions of a trace are over compressed entries, too."""
    return any(n.target is ATTEND and AttendArguments.of(n).compress_rate for n in trace.attends)


def takes_choice(mixer: fx.Node) -> bool:
    """Return whether an attention is over the tokens that were chosen for the one before."""
    if mixer.target is not ATTEND:
        return False
    call = AttendArguments.of(mixer)
    return call.index_topk > 0 and call.index_heads == 0


def join_indexers(trace: Trace) -> Trace:
    """Return a trace, changed in place, that brings what indexers and compressors compute in the rows of q and k.

    Sequences may then be as long as the model has positions. If any attention that chooses has a window, indexers are
    left out instead.
    """
    calls = [AttendArguments.of(n) for n in trace.attends if n.target is ATTEND]
    if not any(call.index_topk or call.compress_rate for call in calls):
        return trace
    choosing = [call for call in calls if call.index_topk and not call.compress_rate]
    if not all(call.window is None for call in choosing):
        return leave_out_indexers(trace)
    for i, attend in enumerate(trace.attends):
        if attend.target is ATTEND:
            trace.attends[i] = _joined(trace, attend)
    remove_dead(trace.graph)
    return replace(trace, facts=changed(trace.facts, max_positions=trace.facts.own_positions))


def join_scores(trace: Trace) -> Trace:
    """Return a trace, changed in place, that brings what changes scores, biases and sinks, in the rows of q."""
    for i, attend in enumerate(trace.attends):
        if attend.target is ATTEND and (call := AttendArguments.of(attend)).score_rows:
            with trace.graph.inserting_before(attend):
                q = _side_by_side(trace.graph, [call.q, *call.score_rows])
            given = (*attend.args, *NO_MORE[len(attend.args) - PLAIN :])[1:-OF_SCORES]
            args = (q, *given, call.profiles, None, call.row_sinks, None)
            trace.attends[i] = _replaced(trace, attend, args)
    return trace


def leave_out_indexers(trace: Trace) -> Trace:
    """Return a trace, changed in place, whose attentions are over all tokens; it has no compressed entries."""
    for i, attend in enumerate(trace.attends):
        if attend.target is ATTEND and AttendArguments.of(attend).index_topk:
            trace.attends[i] = _replaced(trace, attend, attend.args[:PLAIN])
    remove_dead(trace.graph)
    left = set(trace.graph.nodes)  # without compressors of index keys
    trace.attends[:] = [n for n in trace.attends if n in left]
    return trace


def _joined(trace: Trace, attend: fx.Node) -> fx.Node:
    call = AttendArguments.of(attend)
    if not call.shared_rows:
        return attend
    *of_queries, keys = call.index_rows or (None,)
    stored = [n for n in (call.k, call.entry, keys) if n is not None]
    dim = 0 if keys is None else tensor_meta(keys).one_token[-1]
    with trace.graph.inserting_before(attend):
        q, k = (_side_by_side(trace.graph, parts) for parts in ([call.q, *of_queries], stored))
    entries, blocks = (call.compress_rate, None), (call.index_pool, call.index_local)
    args = (q, k, *attend.args[2:PLAIN], call.index_topk, call.index_heads, dim, None, False, *entries, *blocks)
    return _replaced(trace, attend, args)


def _side_by_side(graph: fx.Graph, parts: list[fx.Node]) -> fx.Node:
    if len(parts) == 1:
        return parts[0]
    node = graph.call_function(aten.cat.default, (parts, 1))
    columns = sum(tensor_meta(part).one_token[-1] for part in parts)
    node.meta["about"] = Meta.of(tensor_meta(parts[0]).dtype, (TOKENS, columns))
    return node


def _replaced(trace: Trace, attend: fx.Node, args: tuple[Argument, ...]) -> fx.Node:
    with trace.graph.inserting_before(attend):
        node = trace.graph.call_function(ATTEND, args)
    node.meta = dict(attend.meta)
    attend.replace_all_uses_with(node)
    trace.graph.erase_node(attend)
    return node
