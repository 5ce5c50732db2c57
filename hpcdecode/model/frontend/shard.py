"""Make a member's own trace: the graph over its own columns, with sums where members' partial results are added up.

The graph is written anew. A tensor that is dealt out (`Deal`) has the member's own columns alone. What every member has
whole is narrowed where it meets one that is dealt out: of a weight, the member's part is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import fx

from hpcdecode.model.frontend.deal import Deal
from hpcdecode.model.frontend.member_graph import MemberGraph
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.operators import MEMBER_SUM
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.trace import Trace


class MemberTrace(NamedTuple):
    """The trace of one member of a group.

    Attributes:
        trace: Graph over the member's own columns; calls of `hpcdecode::member_sum` add up what the members have.
        share: Part of the projections' weights that the member holds, 0 to 1.
        vocabulary: Logits that the member computes.
        kv_heads: KV heads that the member has, by attention. Members have equally many.
    """

    trace: Trace
    share: float
    vocabulary: range
    kv_heads: tuple[range, ...]

    @property
    def sums(self) -> int:
        """Return the number of sums over members in a step."""
        return sum(node.target is MEMBER_SUM for node in self.trace.graph.nodes)


def member_trace(trace: Trace, members: int, member: int) -> MemberTrace:
    """Return the trace of one member of a group. The given trace stays as it is; for one member it is returned.

    Args:
        trace: Trace of the whole model.
        members: Number of members, K >= 1.
        member: Number of the member, from 0.
    """
    if not 0 <= member < members:
        raise ValueError(f"expected a member from 0 to {members - 1}, got {member}")
    if members > 1:
        return member_of(Deal(trace, members), member)
    heads = tuple(range(AttendArguments.of(node).kv_heads) for node in trace.attends)
    return MemberTrace(trace, 1.0, range(tensor_meta(trace.logits).one_token[-1]), heads)


def member_of(deal: Deal, member: int) -> MemberTrace:
    """Return the trace of one of the members whom `deal` deals to."""
    trace, made = deal.trace, MemberGraph(deal, member)
    new, logits = made.new, deal.of.get(deal.trace.logits)
    own = replace(
        trace,
        graph=made.graph,
        ids=new[trace.ids],
        positions=new[trace.positions],
        logits_indices=new[trace.logits_indices],
        weights=made.weights,
        constants=made.constants,
        attends=[new[node] for node in trace.attends],
        logits=new[trace.logits],
        cuts=made.cuts,
    )
    vocabulary = range(tensor_meta(trace.logits).one_token[-1])
    if logits is not None:
        ((first, last),) = logits.ranges(member)
        vocabulary = range(first, last)
    return MemberTrace(own, made.share, vocabulary, tuple(own_heads(deal, node, member) for node in trace.attends))


def own_heads(deal: Deal, attend: fx.Node, member: int) -> range:
    """Return the KV heads of an attention that a member has."""
    heads = AttendArguments.of(attend).kv_heads
    if attend not in deal.of:
        return range(heads)
    return range(heads * member // deal.members, heads * (member + 1) // deal.members)
