"""Experts that are dealt out whole to the members of a group (expert parallelism).

A member's projection of its own experts leaves zeros in the rows of others' experts, so the sum over members is the
whole result. If all that reads the rows works on each by itself, up to the next projection of the same experts, no sum
is needed between the two: the next one skips the same rows.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray
from torch import fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.meta import meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node
from hpcdecode.model.frontend.operators import EXPERT_LINEAR, JOINS, SPLITS, UNCHANGED, aten, dim_argument, is_pointwise
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.units import Ints


def owners_of_experts(trace: Trace, members: int) -> dict[fx.Node, Ints]:
    """Return by projection the member that has each expert, [E]: runs of equally many, or one more or less.

    Args:
        trace: Trace of the whole model.
        members: Number of members of the group.

    Raises:
        UserError: If a layer has fewer experts than there are members.
    """
    nodes = [node for node in trace.graph.nodes if node.target is EXPERT_LINEAR]
    counts = {node: experts_of(node) for node in nodes}
    if members > (fewest := min(counts.values(), default=members)):
        raise UserError(
            f"--ep: expected at most {fewest} ranks of tensor parallelism, the experts of a layer, got {members}; "
            "lower --tp, or leave --ep out"
        )
    return {node: owner_of(np.arange(count), count, members) for node, count in counts.items()}


def owner_of(expert: NDArray[np.int64], experts: int, members: int) -> NDArray[np.int64]:
    """Return the member that has each of some experts, of `experts` that are dealt out to `members`."""
    return expert * members // experts


def require_experts(trace: Trace) -> None:
    """Raise UserError if the model has no layer of experts."""
    if not any(node.target is EXPERT_LINEAR for node in trace.graph.nodes):
        raise UserError(
            "--ep: expected a model with layers of experts (MoE), this one has none; leave --ep out: --tp alone deals "
            "out the layers of any model"
        )


def experts_of(projection: fx.Node) -> int:
    """Return the number of experts of a projection."""
    return tensor_meta(as_node(projection.args[2])).one_token[0]


def first_expert(node: fx.Node) -> int:
    """Return the number of the first expert that has weights in a projection by experts."""
    return as_int(node.args[5]) if len(node.args) > 5 else 0


def feeds_same_experts(projection: fx.Node) -> bool:
    """Return whether only projections of the same experts read the rows that `projection` makes, each by itself."""
    expert, experts = projection.args[1], experts_of(projection)
    rows = tensor_meta(projection).shape[:2]
    pending, seen = [projection], {projection}
    while pending:
        node = pending.pop()
        if not node.users:
            return False
        for user in node.users:
            if user.target is EXPERT_LINEAR:
                if user.args[0] is not node or user.args[1] is not expert or experts_of(user) != experts:
                    return False
            elif not by_rows(user, rows):
                return False
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return True


def by_rows(node: fx.Node, rows: tuple[int | str, ...]) -> bool:
    """Return whether row [i, j] of a result depends on row [i, j] alone of operands [T, K, ...]; rows: T and K."""
    shapes = [about.shape for n in node.all_input_nodes if (about := meta(n)) and about.shape[:2] == rows]
    if node.target in SPLITS:
        return dim_argument(node, 2, len(shapes[0])) > 1
    about = meta(node)
    if about is None or about.shape[:2] != rows:
        return False
    rank = len(about.shape)
    if node.target in {aten.slice.Tensor} | JOINS:
        return dim_argument(node, 1, rank) > 1
    if is_pointwise(node):
        return all(len(shape) == rank for shape in shapes)
    return node.target in VIEWS | UNCHANGED or node.target is operator.getitem
