"""Where to cut: a minimum weighted cut of the graph at every attention (Lamina 5.3), weighted by bytes per token."""

from __future__ import annotations

from collections import deque

import networkx as nx
from torch import fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.meta import meta, size_of
from hpcdecode.model.frontend.trace import Trace

SYMBOL, STATIC, POSITION, TOKEN = "symbol", "static", "position", "token"
OUT_OF_REACH = 1 << 40


def node_kinds(trace: Trace) -> dict[fx.Node, str]:
    """What each node's value depends on: nothing that a step brings, sizes, the positions alone, or the tokens.

    STATIC and SYMBOL nodes are remade wherever they are used and never cross a cut.
    """
    kinds: dict[fx.Node, str] = {trace.positions: POSITION, trace.ids: TOKEN, trace.logits_indices: TOKEN}
    for node in trace.graph.nodes:
        if node in kinds:
            continue
        inputs = {kinds[n] for n in node.all_input_nodes}
        if size_of(node) is not None:
            kinds[node] = SYMBOL
        else:
            kinds[node] = next((k for k in (TOKEN, POSITION) if k in inputs), STATIC)
    return kinds


def find_cuts(trace: Trace, kinds: dict[fx.Node, str]) -> list[tuple[fx.Node, ...]]:
    """For each attention the tensors that cross the cut there besides q, k and v, in graph order.

    All that hangs on the positions alone is computed before the first attention.
    """
    depth = attention_depth(trace, kinds)
    done = {n for n, kind in kinds.items() if kind == POSITION} | {trace.ids, trace.logits_indices}
    order = {node: i for i, node in enumerate(trace.graph.nodes)}
    cuts = []
    for i, attend in enumerate(trace.attends):
        free = [n for n in order if kinds[n] == TOKEN and n not in done and depth[n] <= i and n is not attend]
        done |= source_side(attend, free, done, kinds, trace)
        crossing = [n for n in done if later_users(n, attend, done, kinds)]
        cuts.append(tuple(sorted(crossing, key=order.get)))
        done.add(attend)
    return cuts


def later_users(node: fx.Node, attend: fx.Node, done: set[fx.Node], kinds) -> list[fx.Node]:
    """Who needs `node` after `attend`; q, k and v themselves go over the wire, sizes are read off other tensors."""
    return [u for u in node.users if u not in done and u is not attend and kinds[u] != SYMBOL]


def attention_depth(trace: Trace, kinds) -> dict[fx.Node, int]:
    """How many attentions a node's value has passed through; raises UserError unless they form one chain."""
    depth: dict[fx.Node, int] = {}
    for node in trace.graph.nodes:
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0)
        if node in trace.attends:
            if depth[node] != trace.attends.index(node):
                raise UserError("its attentions do not follow one after the other: not supported")
            depth[node] += 1
    return depth


def source_side(attend: fx.Node, free: list[fx.Node], done: set[fx.Node], kinds, trace: Trace) -> set[fx.Node]:
    """The nodes of `free` to compute before `attend`: the smallest source side of a minimum cut.

    A tensor counts once however many consumers it has, and whatever a computed node needs is computed too.
    """
    free_set = set(free)
    flow = nx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    producers = {n for f in free for n in f.all_input_nodes if n in done} | free_set
    for node in producers:
        if node in done:
            flow.add_edge("source", node)
        for n in node.all_input_nodes if node in free_set else ():
            if n in free_set:
                flow.add_edge(node, n)  # source side closed under predecessors
        users = later_users(node, attend, done, kinds)
        if users:
            flow.add_edge(node, ("cut", node), capacity=cost(node, trace))
        for user in users:
            flow.add_edge(("cut", node), user if user in free_set else "sink")
    for node in attend.args[:3]:
        flow.add_edge("source", node)
    return reachable(flow) & free_set


def cost(node: fx.Node, trace: Trace) -> int:
    """Weight of a cut through `node`: bytes per token, out of reach for token ids and for tuples of tensors."""
    if node is trace.ids or meta(node) is None:
        return OUT_OF_REACH
    return 0 if node is trace.logits_indices else meta(node).bytes_per_token


def reachable(flow: nx.DiGraph) -> set:
    """Source side of the minimum cut of `flow` that is nearest to the source."""
    residual = nx.algorithms.flow.edmonds_karp(flow, "source", "sink")
    seen, queue = {"source"}, deque(["source"])
    while queue:
        for node, edge in residual[queue.popleft()].items():
            if node not in seen and edge["flow"] < edge["capacity"]:
                seen.add(node)
                queue.append(node)
    return seen
