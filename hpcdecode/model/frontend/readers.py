"""What reads the weights of a trace, which says how they may be held."""

from __future__ import annotations

import torch
from torch import fx

from hpcdecode.model.frontend.lora import TargetWeight
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten


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
    embedding = aten.embedding.default
    return {
        name
        for node, name in trace.weights.items()
        if node not in trace.cuts and all(u.target is embedding and u.args[0] is node for u in node.users)
    }


def adapter_targets(trace: Trace) -> dict[str, TargetWeight]:
    """Return the weights that adapters (LoRA) may update, by name, in the model's order; trace: of a whole model."""
    return {name: TargetWeight(tensor_meta(node).one_token, is_turned(node)) for node, name in trace.weights.items()}


def is_turned(weight: fx.Node) -> bool:
    """Return whether a weight is stored as [in, out], as layers of the class Conv1D have it, or [E, in, out]."""
    linear = torch.ops.hpcdecode.expert_linear.default
    return any(
        (node.target is aten.addmm.default and node.args[2] is weight)
        or (node.target is linear and node.args[2] is weight and node.args[4] is True)
        for node in weight.users
    )
