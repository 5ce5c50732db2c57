"""Which rows of a member's share of a sum can be other than zeros, where whole experts are dealt out.

A token's row in a member's share of an expert layer is zeros unless the router chose one of the member's experts for
it. So the member need not send the others' rows. That ends where something is added that does not depend on the choice,
such as a member's part of a shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from hpcdecode.model.frontend.meta import meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node
from hpcdecode.model.frontend.operators import EXPERT_LINEAR, MEMBER_SUM, MOVES, SPLITS, UNCHANGED, aten

_SAME_ROWS = (MOVES - SPLITS) | UNCHANGED | {aten.expand.default, aten.neg.default}


class ExpertRows(NamedTuple):
    """What a share has of experts.

    Attributes:
        expert: Node of the experts that the router chose, int64 [T, k].
        experts: E, their number in the whole layer.
        alone: Whether a row of the share is zeros if none of the token's experts is this member's.
    """

    expert: fx.Node
    experts: int
    alone: bool


def note_expert_rows(graph: fx.Graph, experts: Mapping[fx.Node, int]) -> None:
    """Give every sum over members the experts that its shares are of, in place.

    Args:
        graph: Of one member.
        experts: E by projection of experts that are dealt out whole.
    """
    known: dict[fx.Node, ExpertRows | None] = {}
    for node in graph.nodes if experts else ():
        if node.target is MEMBER_SUM:
            found = known.get(share := as_node(node.args[0]))
            if found is not None:
                node.args = (share, found.expert, found.experts, found.alone and _rows_are_tokens(share))
        elif node.op == "call_function":
            known[node] = _rows_of(node, known, experts)


def _rows_of(
    node: fx.Node, known: Mapping[fx.Node, ExpertRows | None], experts: Mapping[fx.Node, int]
) -> ExpertRows | None:
    """Return what the result of a call has of experts; known: that of the calls before it."""
    if node.target is EXPERT_LINEAR:
        return ExpertRows(as_node(node.args[1]), experts[node], alone=True) if node in experts else None
    of = [found for n in node.all_input_nodes if (found := known.get(n)) is not None]
    if not of or meta(node) is None:
        return None
    return of[0]._replace(alone=_stays_alone(node, known))


def _stays_alone(node: fx.Node, known: Mapping[fx.Node, ExpertRows | None]) -> bool:
    """Return whether a row of a call's result is zeros wherever those of its operands that are of experts are."""
    inputs = [n for n in node.args if isinstance(n, fx.Node) and meta(n) is not None]
    alone = [found.expert for n in inputs if (found := known.get(n)) is not None and found.alone]
    if not alone or tensor_meta(node).token_dim is None:
        return False
    first = node.args[0] in inputs and known.get(as_node(node.args[0])) is not None
    if node.target in _SAME_ROWS:
        return first
    if node.target is aten.sum.dim_IntList:
        dims, operand = node.args[1], tensor_meta(inputs[0])
        given = [as_int(d) % len(operand.shape) for d in dims] if isinstance(dims, list | tuple) else []
        return first and bool(given) and operand.token_dim not in given
    if node.target is aten.div.Tensor:
        return first
    if node.target is aten.mul.Tensor:
        return True
    return node.target is aten.add.Tensor and len(alone) == 2 and alone[0] is alone[1] and not node.kwargs


def _rows_are_tokens(share: fx.Node) -> bool:
    """Return whether a tensor is one row a token, [T, columns], but for dimensions of size 1 before that."""
    about = tensor_meta(share)
    dim = about.token_dim
    return dim is not None and dim == len(about.shape) - 2 and all(size == 1 for size in about.shape[:dim])
