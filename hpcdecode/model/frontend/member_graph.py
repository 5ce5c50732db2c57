"""Write the graph of a trace anew, over the columns that one member of a group has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from hpcdecode.errors import InvariantViolation
from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.deal import EVERYONE, Deal, Dealt
from hpcdecode.model.frontend.expert_rows import note_expert_rows
from hpcdecode.model.frontend.member_mixers import mixer_arguments
from hpcdecode.model.frontend.membership import WeightCut
from hpcdecode.model.frontend.meta import Meta, meta, size_of, tensor_meta
from hpcdecode.model.frontend.mixers import MIXERS
from hpcdecode.model.frontend.nodes import as_int, as_node, as_nodes
from hpcdecode.model.frontend.operators import (
    EXPERT_LINEAR,
    JOINS,
    SPLITS,
    Linear,
    dim_argument,
    is_pointwise,
    slice_argument,
)
from hpcdecode.model.frontend.partial_sums import PartialSums
from hpcdecode.model.frontend.whole_experts import experts_of

aten = torch.ops.aten
SIZED: frozenset[Target] = VIEWS | {aten.expand.default}  # argument 1 is the shape of the result


class MemberGraph:
    """The graph of one member.

    Args:
        deal: What each member has.
        member: Number of the member.

    Attributes:
        graph: The graph.
        new: Node in it of each node of the whole trace: of its own columns, once it is summed up.
        weights: Name in the transformers model, by placeholder.
        constants: Values of the buffers that checkpoints leave out, by placeholder.
        cuts: What part of its weight a placeholder takes; those that take all are left out.
        share: Part of the projections' weights that the member holds.
    """

    def __init__(self, deal: Deal, member: int):
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.weights: dict[fx.Node, str] = {}
        self.constants: dict[fx.Node, Tensor] = {}
        self.cuts: dict[fx.Node, WeightCut] = {}
        self._deal, self._member = deal, member
        self._narrowed: dict[object, fx.Node] = {}
        self._held = self._whole = 0
        self._of_experts: dict[fx.Node, int] = {}  # how many there are, by projection of whole ones
        self._sums = PartialSums(self.graph)
        for node in deal.trace.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._run(node)
        self.graph.output((self.own(deal.trace.logits),))
        note_expert_rows(self.graph, self._of_experts)
        self._drop_unused()
        self.share = self._held / max(self._whole, 1)

    def own(self, node: fx.Node) -> fx.Node:
        """Return what the member has of the tensor that `node` computes."""
        return self._value(node, self._deal.of.get(node))

    def _placeholder(self, node: fx.Node) -> None:
        trace, made = self._deal.trace, self.graph.node_copy(node)
        self.new[node] = made
        if node in trace.weights:
            self.weights[made] = trace.weights[node]
        elif node in trace.constants:
            self.constants[made] = trace.constants[node]

    def _drop_unused(self) -> None:
        """Remove placeholders of weights and constants that the member does not read."""
        for known in (self.weights, self.constants):
            for node in [n for n in known if not n.users]:
                del known[node]
                self.cuts.pop(node, None)
                self.graph.erase_node(node)

    def _run(self, node: fx.Node) -> None:
        """Write the call `node`."""
        linear = self._deal.projections.get(node)
        if linear is not None and self._deal.sums_up(linear):
            self._sums.note(node, self._project(linear, self._deal.of_weight(linear)))
        elif linear is not None:
            self.new[node] = self._project(linear, self._deal.of_weight(linear))
        elif self._deal.is_partial(node):
            self._sums.note(node, self._reduce(node))
        elif node in self._deal.of or not self._sums.carry(node, self.own):
            self.new[node] = self._call(node)
        if node in self._sums and len(node.users) != 1:
            self.new[node] = self._sums.added_up(node)

    def _value(self, node: fx.Node, want: Dealt | None) -> fx.Node:
        """Return the value of a node that every member has whole, or that is dealt out as `want` says."""
        if node in self._sums:
            self.new[node] = self._sums.added_up(node)
        have = self._deal.of.get(node)
        if have is want or (have is not None and have.same(want)):
            return self.new[node]
        if have is not None or want is None:
            raise InvariantViolation("dealt", f"{node.name} is dealt out in another way than {want} needs it")
        return self._narrow(node, want)

    def _emit(self, node: fx.Node, args: Sequence[Argument], target: Target | None = None) -> fx.Node:
        """Add a call like `node` with other arguments: the member's part of it."""
        kwargs = {name: fx.map_arg(value, self.own) for name, value in node.kwargs.items()}
        made = self.graph.create_node("call_function", target or node.target, tuple(args), kwargs, node.name)
        made.meta = self._meta(node, self._deal.of.get(node))
        return made

    def _meta(self, node: fx.Node, dealt: Dealt | None) -> dict[str, Any]:
        about = meta(node)
        if about is None or dealt is None:
            return dict(node.meta)
        dim, size = dealt.dim, len(dealt.own(self._member))
        shape, one_token = list(about.shape), list(about.one_token)
        shape[dim] = one_token[dim] = size
        return {"about": Meta(about.dtype, tuple(shape), tuple(one_token))}

    def _call(self, node: fx.Node) -> fx.Node:
        """Add the call `node` over the member's own columns."""
        dealt, target = self._deal.of.get(node), node.target
        if target in SPLITS or target is aten.slice.Tensor:
            return self._split(node) if target in SPLITS else self._slice(node)
        if dealt is None:
            return self._emit(node, fx.map_arg(node.args, self.own))
        if target in SIZED:
            return self._sized(node, dealt)
        if target in JOINS:
            return self._join(node, dealt)
        if target in MIXERS:
            return self._emit(node, mixer_arguments(node, dealt, self._member, self._value))
        if is_pointwise(node):
            return self._emit(node, fx.map_arg(node.args, lambda n: self._aligned(n, node, dealt)))
        return self._emit(node, fx.map_arg(node.args, self.own))

    def _aligned(self, operand: fx.Node, result: fx.Node, dealt: Dealt) -> fx.Node:
        """Return an operand of a call that works element by element, as the result needs it."""
        if size_of(operand) is not None:
            return self.new[operand]
        dim = unbroadcast_dim(operand, result, dealt.dim)
        return self._value(operand, None if dim is None else Dealt(dim, dealt.owners))

    def _sized(self, node: fx.Node, dealt: Dealt) -> fx.Node:
        """Add a view or an expansion: the size of the dimension that is dealt out is the member's."""
        x, sizes = as_node(node.args[0]), node.args[1]
        given = list(sizes) if isinstance(sizes, list | tuple) else []
        if isinstance(given[dealt.dim], int) and given[dealt.dim] != -1:
            given[dealt.dim] = len(dealt.own(self._member))
        value = self._aligned(x, node, dealt) if node.target is aten.expand.default else self.own(x)
        return self._emit(node, [value, fx.map_arg(given, self.own), *node.args[2:]])

    def _slice(self, node: fx.Node) -> fx.Node:
        x = as_node(node.args[0])
        dim, dealt = dim_argument(node, 1, len(tensor_meta(x).shape)), self._deal.of.get(x)
        if dealt is None or dealt.dim != dim:
            return self._emit(node, fx.map_arg(node.args, self.own))
        own = dealt.slice(self._member, slice_argument(node))
        step = [] if own.step == 1 else [own.step]
        return self._emit(node, [self.own(x), dim, own.start, own.stop, *step])

    def _split(self, node: fx.Node) -> fx.Node:
        x, stated = as_node(node.args[0]), node.args[1]
        dim, dealt = dim_argument(node, 2, len(tensor_meta(x).shape)), self._deal.of.get(x)
        if dealt is None or dealt.dim != dim:
            return self._emit(node, fx.map_arg(node.args, self.own))
        whole = len(dealt.owners)
        if isinstance(stated, int):
            sizes = [min(stated, whole - first) for first in range(0, whole, stated)]
        else:
            sizes = [as_int(size) for size in stated] if isinstance(stated, list | tuple) else []
        counts = dealt.counts(self._member, sizes)
        if node.target is aten.split.Tensor and len(set(counts)) == 1:
            return self._emit(node, [self.own(x), counts[0], dim])
        return self._emit(node, [self.own(x), counts, dim], aten.split_with_sizes.default)

    def _join(self, node: fx.Node, dealt: Dealt) -> fx.Node:
        """Add a concatenation or a stack of the member's own columns of the parts."""
        parts, first = [], 0
        dim = dim_argument(node, 1, len(tensor_meta(node).shape))
        stacked = node.target is aten.stack.default
        for part in as_nodes(node.args[0]):
            owners = dealt.owners
            if dim == dealt.dim:
                last = first + tensor_meta(part).one_token[dim]
                owners, first = owners[first:last], last
            parts.append(self._value(part, Dealt(dealt.dim - (stacked and dim < dealt.dim), owners)))
        return self._emit(node, [parts, dim])

    def _reduce(self, node: fx.Node) -> fx.Node:
        """Add the member's part of a mean or a sum over columns of all members."""
        x = as_node(node.args[0])
        made = self._emit(node, [self.own(x), *node.args[1:]])
        if node.target is not aten.mean.dim:
            return made
        dealt = self._deal.of[x]
        part = self.graph.call_function(aten.mul.Tensor, (made, len(dealt.own(self._member)) / len(dealt.owners)))
        part.meta = dict(made.meta)
        return part

    def _project(self, linear: Linear, dealt: Dealt | None) -> fx.Node:
        """Add a projection whose weight is dealt out along its experts, inputs or outputs, or not at all."""
        node, x = linear.node, self.own(linear.x)
        weight, bias = self._value(linear.weight, dealt), None
        self._held += tensor_meta(weight).numel_per_token
        self._whole += tensor_meta(linear.weight).numel_per_token
        summed = dealt is not None and dealt.dim == linear.in_dim
        if linear.bias is not None and not (summed and self._member > 0):
            dim = 0 if node in self._deal.experts else len(tensor_meta(linear.bias).shape) - 1
            bias = self._value(linear.bias, None if dealt is None or summed else Dealt(dim, dealt.owners))
        if node.target is EXPERT_LINEAR:
            expert, whole = self.own(as_node(node.args[1])), dealt is not None and node in self._deal.experts
            first = [int(dealt.own(self._member)[0])] if dealt is not None and whole else []
            made = self._emit(node, [x, expert, weight, bias, node.args[4], *first])
            if whole:
                self._of_experts[made] = experts_of(node)
            return made
        if node.target is aten.addmm.default:
            bias = bias or self._zeros(as_node(linear.bias))
            return self._emit(node, [bias, x, weight])
        return self._emit(node, [x, weight] if bias is None else [x, weight, bias])

    def _zeros(self, bias: fx.Node) -> fx.Node:
        """Return a bias of zeros, for an operator that must have one."""
        about = tensor_meta(bias)
        made = self._input(bias, f"no_{bias.name}", None)
        self.constants[made] = torch.zeros(about.one_token, dtype=about.dtype)
        return made

    def _input(self, like: fx.Node, name: str, dealt: Dealt | None) -> fx.Node:
        """Add a placeholder after that of `like`."""
        with self.graph.inserting_after(self.new[like]):
            made = self.graph.placeholder(name)
        made.meta = self._meta(like, dealt)
        return made

    def _narrow(self, node: fx.Node, want: Dealt) -> fx.Node:
        """Return the member's own columns of a tensor that every member has whole."""
        if (want.owners == EVERYONE).all():
            return self.new[node]
        key = node, want.dim, want.owners.tobytes()
        if key not in self._narrowed:
            self._narrowed[key] = self._narrowed_anew(node, want)
        return self._narrowed[key]

    def _narrowed_anew(self, node: fx.Node, want: Dealt) -> fx.Node:
        trace = self._deal.trace
        if node in trace.weights:
            made = self._input(node, node.name, want)
            self.weights[made] = trace.weights[node]
            self.cuts[made] = WeightCut(want.dim, len(want.owners), want.ranges(self._member))
            return made
        if node in trace.constants:
            made = self._input(node, node.name, want)
            own = torch.from_numpy(want.own(self._member))
            self.constants[made] = trace.constants[node].index_select(want.dim, own)
            return made
        made = self._of_own_operands(node, want) or self._own_slices(node, want)
        made.meta = self._meta(node, want)
        return made

    def _of_own_operands(self, node: fx.Node, want: Dealt) -> fx.Node | None:
        """Add a call like `node` of the member's own columns of its operands, or return None if that is not simple."""
        if is_pointwise(node) and node in self._deal.static:
            return self._emit(node, fx.map_arg(node.args, lambda n: self._aligned(n, node, want)))
        if node.target is aten.expand.default and unbroadcast_dim(as_node(node.args[0]), node, want.dim) is None:
            return self._sized(node, want)
        return None

    def _own_slices(self, node: fx.Node, want: Dealt) -> fx.Node:
        """Add slices of the whole tensor that `node` computes, and join them."""
        parts = []
        for first, last in want.ranges(self._member):
            parts.append(self.graph.call_function(aten.slice.Tensor, (self.new[node], want.dim, first, last)))
            owners = want.owners[first:last]
            parts[-1].meta = self._meta(node, Dealt(want.dim, np.full_like(owners, self._member)))
        return parts[0] if len(parts) == 1 else self.graph.call_function(aten.cat.default, (parts, want.dim))


def unbroadcast_dim(operand: fx.Node, result: fx.Node, dim: int) -> int | None:
    """Return the dimension of an operand that is the dimension `dim` of the result, or None if it is broadcast."""
    shape, whole = tensor_meta(operand).one_token, tensor_meta(result).one_token
    own = dim - len(whole) + len(shape)
    return own if own >= 0 and shape[own] == whole[dim] else None
