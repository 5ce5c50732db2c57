"""Where to cut: a minimum weighted cut of the graph at every attention, weighted by bytes per token.

Lamina, section 5.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from torch import fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.meta import meta, size_of
from hpcdecode.model.frontend.mixers import MIXERS, rows_of
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.trace import Trace

if TYPE_CHECKING:
    import networkx as nx

Dependence = Literal["symbol", "static", "position", "token"]
SYMBOL: Final = "symbol"
STATIC: Final = "static"
POSITION: Final = "position"
TOKEN: Final = "token"
UNCUTTABLE = 1 << 40  # bytes per token, more than any cut costs


def dependences(trace: Trace) -> dict[fx.Node, Dependence]:
    """Return by node what its value depends on.

    SYMBOL nodes are sizes. STATIC nodes depend on no input of a step. POSITION nodes depend on the positions alone,
    TOKEN nodes on the tokens, or on positions and weights: each layer has others of those, which need not wait for it.
    SYMBOL and STATIC nodes are computed wherever they are used, and never cross a cut.
    """
    found: dict[fx.Node, Dependence] = {**dict.fromkeys(trace.step_inputs, TOKEN), trace.positions: POSITION}
    weighted = set(trace.weights)
    for node in trace.graph.nodes:
        if node in found:
            continue
        kind = dependence(node, {found[n] for n in node.all_input_nodes})
        reads_weights = not weighted.isdisjoint(node.all_input_nodes)
        found[node] = TOKEN if kind == POSITION and reads_weights else kind
        if kind == STATIC and reads_weights:
            weighted.add(node)
    return found


def dependence(node: fx.Node, inputs: set[Dependence]) -> Dependence:
    """Return what the value of `node` depends on, given what its `inputs` depend on."""
    if size_of(node) is not None:
        return SYMBOL
    if TOKEN in inputs:
        return TOKEN
    return POSITION if POSITION in inputs else STATIC


def find_cuts(trace: Trace, kinds: Mapping[fx.Node, Dependence]) -> list[tuple[fx.Node, ...]]:
    """Return for each attention the tensors that cross the cut there besides q, k and v, in the graph's order.

    Whatever depends on the positions alone is computed before the first attention.

    Args:
        trace: Trace of the model.
        kinds: Result of `dependences`.

    Raises:
        UserError: If the attentions do not form one chain.
    """
    depth = attention_depth(trace)
    done = {n for n, kind in kinds.items() if kind == POSITION} | set(trace.step_inputs)
    order = {node: i for i, node in enumerate(trace.graph.nodes)}
    cuts = []
    needed = set(done)  # what nothing needs any more nothing will need later
    for i, attend in enumerate(trace.attends):
        free = [n for n in order if kinds[n] == TOKEN and n not in done and depth[n] <= i and n is not attend]
        before = source_side(attend, free, done, kinds, trace)
        done |= before
        needed = {n for n in needed | before if later_users(n, attend, done, kinds)}
        cuts.append(tuple(sorted(needed, key=lambda n: order[n])))
        done.add(attend)
        needed.add(attend)
    return cuts


def later_users(
    node: fx.Node, attend: fx.Node, done: set[fx.Node], kinds: Mapping[fx.Node, Dependence]
) -> list[fx.Node]:
    """Return the nodes that need `node` after `attend`.

    The attention itself gets q, k and v in messages, and sizes are read from other tensors.
    """
    return [u for u in node.users if u not in done and u is not attend and kinds[u] != SYMBOL]


def attention_depth(trace: Trace) -> dict[fx.Node, int]:
    """Return by node how many attentions its value has passed; raise UserError unless they form one chain."""
    depth: dict[fx.Node, int] = {}
    places = {attend: place for place, attend in enumerate(trace.attends)}
    for node in trace.graph.nodes:
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0)
        if (place := places.get(node)) is not None:
            if depth[node] > place:
                raise UserError("its attentions do not follow one after the other: not supported")
            depth[node] = place + 1
    return depth


def source_side(
    attend: fx.Node,
    free: Sequence[fx.Node],
    done: set[fx.Node],
    kinds: Mapping[fx.Node, Dependence],
    trace: Trace,
) -> set[fx.Node]:
    """Return the nodes to compute before `attend`: the smallest source side of a minimum cut.

    A tensor counts once however many nodes read it. Whatever a computed node needs is computed too.

    Args:
        attend: The attention at which the graph is cut.
        free: Nodes that may be computed before or after it.
        done: Nodes that are computed already.
        kinds: What each node depends on.
        trace: Trace of the model.
    """
    import networkx as nx

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
    for node in rows_of(attend):
        flow.add_edge("source", node)
    return free_set & reachable(flow)


def cost(node: fx.Node, trace: Trace) -> int:
    """Return the bytes per token that cross a cut at `node`.

    They are UNCUTTABLE for token ids, for tuples of tensors, and for what mixers give, whose memory is used again.
    """
    about = meta(node)
    if node is trace.ids or about is None or viewed(node).target in MIXERS:
        return UNCUTTABLE
    return 0 if node is trace.logits_indices else about.bytes_per_token


def viewed(node: fx.Node) -> fx.Node:
    """Return the tensor of which `node` is a view, or `node`."""
    while node.target in VIEWS:
        node = as_node(node.args[0])
    return node


def reachable(flow: nx.DiGraph) -> set[object]:
    """Return the source side of the minimum cut of `flow` that is nearest to the source."""
    from networkx.algorithms.flow import edmonds_karp

    residual = edmonds_karp(flow, "source", "sink")
    seen: set[object] = {"source"}
    queue: deque[object] = deque(seen)
    while queue:
        for node, edge in residual[queue.popleft()].items():
            if node not in seen and edge["flow"] < edge["capacity"]:
                seen.add(node)
                queue.append(node)
    return seen
