"""Let LoRA adapters that stay apart from the weights update the projections of a trace (see `adapters.py`)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

from hpcdecode.model.frontend.adapter_updates import AdapterUpdates, UpdatedParts, not_kept_apart, read_updates
from hpcdecode.model.frontend.adapters import expert_lora_update, lora_update
from hpcdecode.model.frontend.lora import TargetWeight
from hpcdecode.model.frontend.membership import WeightCut
from hpcdecode.model.frontend.meta import KEPT, TOKENS, Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.operators import EXPERT_LINEAR, aten
from hpcdecode.model.frontend.readers import is_turned
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.tensors import CheckpointTensor
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.whole_experts import first_expert

RANK_STEP = 16  # ranks are multiples of it in memory


class Projected(NamedTuple):
    """A projection of tokens by a weight: its node, that of its input [..., in], and whether it is by experts."""

    node: fx.Node
    x: fx.Node
    by_experts: bool = False

    @property
    def rows(self) -> int | str:
        """Return what its rows count, TOKENS or KEPT."""
        about = tensor_meta(self.x)
        return TOKENS if self.by_experts else about.shape[-2]


def add_adapters(
    trace: Trace,
    folders: Mapping[str, str],
    sources: Sources,
    weights: Mapping[str, TargetWeight],
    tensors: Mapping[str, CheckpointTensor],
) -> None:
    """Let adapters update the projections of a trace, in place.

    Args:
        trace: Trace of a whole model, or of a member of a group.
        folders: Directories of the adapters, by name; tokens name them by their places.
        sources: Which tensors of the checkpoint make up each weight of the model.
        weights: Weights of the whole model by name.
        tensors: Tensors of the checkpoint by their keys.

    Raises:
        UserError: If an adapter is damaged, of another model, or updates what is no projection of tokens.
    """
    known = {name: node for node, name in trace.weights.items() if node.users}
    of_weight: dict[str, dict[int, AdapterUpdates]] = {}
    for number, (name, folder) in enumerate(folders.items()):
        for weight, updates in read_updates(Path(folder), name, sources, weights, tensors).items():
            if weight not in known or _projected(known[weight]) is None:
                expected = f"projections of tokens, got {updates.module!r:.200}, which is none"
                raise not_kept_apart(Path(folder), name, expected)
            of_weight.setdefault(weight, {})[number] = updates
    inserter = UpdateInserter(trace, list(folders.items()))
    for weight, each in of_weight.items():
        inserter.insert(known[weight], each)


class UpdateInserter:
    """Adds updates to the graph of a trace, and to the trace what reads their weights.

    Args:
        trace: The trace. It gets the placeholder of the tokens' adapters.
        adapters: Names and directories of the adapters.
    """

    def __init__(self, trace: Trace, adapters: list[tuple[str, str]]):
        self._trace, self._adapters = trace, adapters
        with trace.graph.inserting_before(next(iter(trace.graph.nodes))):
            self._numbers = trace.graph.placeholder("adapters")
        self._numbers.meta["about"] = Meta.of(torch.int64, (TOKENS,))
        trace.adapters = self._numbers

    def insert(self, weight: fx.Node, updates: Mapping[int, AdapterUpdates]) -> None:
        """Add the placeholders of A and B of a weight, and what they update behind its use."""
        found, graph = _projected(weight), self._trace.graph
        assert found is not None, "checked before"
        a, b = self._factors(weight, found, updates)
        rows = self._of_rows(found)
        with graph.inserting_after(found.node):
            if found.by_experts:
                expert, experts = as_node(found.node.args[1]), tensor_meta(weight).one_token[0]
                args = (found.node, found.x, rows, expert, a, b, experts, first_expert(found.node))
                update = graph.call_function(expert_lora_update, args)
            else:
                update = graph.call_function(lora_update, (found.node, found.x, rows, a, b))
        update.meta["about"] = found.node.meta["about"]
        found.node.replace_all_uses_with(update, delete_user_cb=partial(operator.is_not, update))

    def _of_rows(self, found: Projected) -> fx.Node:
        """Return the adapters of a projection's rows: of all tokens, or of those whose logits are computed."""
        if found.rows == TOKENS:
            return self._numbers
        graph = self._trace.graph
        with graph.inserting_before(found.node):
            kept = graph.call_function(aten.index_select.default, (self._numbers, 0, self._trace.logits_indices))
        kept.meta["about"] = Meta.of(torch.int64, (KEPT,))
        return kept

    def _factors(
        self, weight: fx.Node, found: Projected, updates: Mapping[int, AdapterUpdates]
    ) -> tuple[fx.Node, fx.Node]:
        """Return placeholders of A and B of all adapters of a weight."""
        trace, turned = self._trace, is_turned(weight)
        *several, rows, columns = tensor_meta(weight).one_token
        outputs, inputs = (columns, rows) if turned else (rows, columns)
        experts, *cuts = _parts(trace.cuts.get(weight), turned, len(several), several[0] if several else 1)
        rank = -(-max(own.rank for own in updates.values()) // RANK_STEP) * RANK_STEP
        count, name, dtype = len(self._adapters) * len(experts), trace.weights[weight], tensor_meta(weight).dtype
        made = []
        for part, shape, cut in zip("ab", ((count, rank, inputs), (count, outputs, rank)), cuts, strict=True):
            with trace.graph.inserting_before(self._numbers):
                node = trace.graph.placeholder(f"lora_{part}_{weight.name}")
            node.meta["about"] = Meta.of(dtype, shape)
            parts = UpdatedParts(self._adapters, name, updates, experts, cut)
            trace.updates[node] = partial(parts.read, part, torch.Size(shape), dtype)
            made.append(node)
        return made[0], made[1]


def _parts(
    cut: WeightCut | None, turned: bool, first: int, experts: int
) -> tuple[list[int], WeightCut | None, WeightCut | None]:
    """Return the experts of which a member has A and B, and what it takes of A [rank, in] and of B [out, rank].

    Args:
        cut: What the member takes of a weight, or None for all of it.
        turned: Whether the weight is stored as [..., in, out].
        first: Number of its dimensions before these.
        experts: Number of experts of a weight that is not cut along them; 1 of one that is of none.
    """
    if cut is None:
        return list(range(experts)), None, None
    if cut.dim < first:
        return [e for begin, end in cut.ranges for e in range(begin, end)], None, None
    of_outputs = cut.dim - first == (1 if turned else 0)
    a, b = (None, cut._replace(dim=0)) if of_outputs else (cut._replace(dim=1), None)
    return list(range(experts)), a, b


def _projected(weight: fx.Node) -> Projected | None:
    """Return the projection that a weight has its only use in, if that is one of tokens."""
    if len(weight.users) != 1:
        return None
    (node,) = weight.users
    if node.target is EXPERT_LINEAR:
        return Projected(node, as_node(node.args[0]), by_experts=True) if node.args[2] is weight else None
    if node.target is aten.linear.default and node.args[1] is weight:
        x = as_node(node.args[0])
    elif node.target is aten.addmm.default and node.args[2] is weight and not node.kwargs:
        x = as_node(node.args[1])
    else:
        return None
    about = tensor_meta(x)
    rows = about.token_dim == len(about.shape) - 2 and about.numel_per_token == about.one_token[-1]
    return Projected(node, x) if rows and about.shape[-2] in (TOKENS, KEPT) else None
