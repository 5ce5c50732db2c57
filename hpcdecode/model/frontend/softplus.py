"""Let softplus that a model writes out, as where(x > limit, x, log(1 + exp(x))), be the operator that it is."""

from __future__ import annotations

import torch
from torch import fx

from hpcdecode.model.frontend.clean import remove_dead

aten = torch.ops.aten
LIMIT = 20  # above it x and log(1 + exp(x)) are the same float32


def join_softplus(graph: fx.Graph) -> None:
    """Replace in `graph`, in place, every softplus that is written out."""
    for node in list(graph.nodes):
        if node.target is aten.where.self and _is_softplus(node):
            with graph.inserting_before(node):
                joined = graph.call_function(aten.softplus.default, (node.args[1],))
            joined.meta = dict(node.meta)
            node.replace_all_uses_with(joined)
    remove_dead(graph)


def _is_softplus(choice: fx.Node) -> bool:
    """Return whether `choice` is x above a limit and log(1 + exp(x)) below it."""
    condition, x, log = choice.args
    if not isinstance(condition, fx.Node) or condition.target is not aten.gt.Scalar or condition.args[0] is not x:
        return False
    if not isinstance(log, fx.Node) or log.target is not aten.log.default:
        return False
    total, limit = log.args[0], condition.args[1]
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or total.args[1:] != (1,):
        return False
    exp = total.args[0]
    known = isinstance(exp, fx.Node) and exp.target is aten.exp.default and exp.args[0] is x
    return known and isinstance(limit, int | float) and limit >= LIMIT
