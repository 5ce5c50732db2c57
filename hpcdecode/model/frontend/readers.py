"""What reads the weights of a trace, which says how they may be held."""

from __future__ import annotations

import torch

from hpcdecode.model.frontend.trace import Trace


def stackable(trace: Trace) -> set[str]:
    """Return the names of experts' weights that only `expert_linear` reads, so that they need not be one tensor."""
    linear = torch.ops.hpcdecode.expert_linear.default
    return {
        name
        for node, name in trace.weights.items()
        if node.users and all(u.target is linear and u.args[2] is node and u.args[4] is False for u in node.users)
    }


def tables_of(trace: Trace) -> set[str]:
    """Return the weights of a trace that are whole, and of which steps look up rows, and nothing else reads any."""
    embedding = torch.ops.aten.embedding.default
    return {
        name
        for node, name in trace.weights.items()
        if node not in trace.cuts and all(u.target is embedding and u.args[0] is node for u in node.users)
    }
