"""The trace of a member of a group: the graph over its own columns, with sums where parts of results are added up.

A tensor that is dealt out (`deal.py`) has the member's own columns alone. What every member has whole is narrowed where
it meets one that is dealt out: of a weight, the member's part is read (`member_graph.py`). Sums stand as late as
possible, so that results that are added share one (`partial_sums.py`).
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from hpcdecode.model.frontend.deal import Deal
from hpcdecode.model.frontend.member_graph import MemberGraph
from hpcdecode.model.frontend.membership import Membership
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.mixers import recur_arguments
from hpcdecode.model.frontend.operators import ATTEND, MEMBER_SUM
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.whole_experts import require_experts


def member_trace(trace: Trace, members: int, member: int, *, ep: bool = False) -> Trace:
    """Return the trace of one member of a group. The given trace stays as it is; for one member it is returned.

    Args:
        trace: Trace of the whole model.
        members: Number of members, K >= 1.
        member: Number of the member, from 0.
        ep: Deal out whole experts, instead of columns of every expert.

    Raises:
        UserError: If there are no experts to deal out, or fewer than members.
    """
    if not 0 <= member < members:
        raise ValueError(f"expected a member from 0 to {members - 1}, got {member}")
    if ep:
        require_experts(trace)
    return trace if members == 1 else trace_of(Deal(trace, members, ep=ep), member)


def trace_of(deal: Deal, member: int) -> Trace:
    """Return the trace of one of the members to whom `deal` deals."""
    trace, made = deal.trace, MemberGraph(deal, member)
    new = made.new
    return replace(
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
        membership=Membership(
            members=deal.members,
            member=member,
            share=made.share,
            vocabulary=own_vocabulary(deal, member),
            heads=tuple(own_heads(deal, node, member) for node in trace.attends),
            copied=tuple(node not in deal.of for node in trace.attends),
            sums=sum(node.target is MEMBER_SUM for node in made.graph.nodes),
            sums_of_own_rows=sum(node.target is MEMBER_SUM and node.args[3:] == (True,) for node in made.graph.nodes),
        ),
    )


def own_vocabulary(deal: Deal, member: int) -> range:
    """Return the logits that a member computes."""
    if deal.trace.logits not in deal.of:
        return range(tensor_meta(deal.trace.logits).one_token[-1])
    own = deal.of[deal.trace.logits].own(member)
    return range(int(own[0]), int(own[-1]) + 1)


def own_heads(deal: Deal, mixer: fx.Node, member: int) -> range:
    """Return the KV heads of an attention, or the value heads of a recurrence, that a member has."""
    attends = mixer.target is ATTEND
    heads = AttendArguments.of(mixer).kv_heads if attends else recur_arguments(mixer).heads
    if mixer not in deal.of:
        return range(heads)
    return range(heads * member // deal.members, heads * (member + 1) // deal.members)
