"""What operators of a trace do to columns: move them, work element by element, reduce or normalise along dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument, Target

from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node

ops.define()
aten = torch.ops.aten
ATTEND = torch.ops.hpcdecode.attend.default
EXPERT_LINEAR = torch.ops.hpcdecode.expert_linear.default
MEMBER_SUM = torch.ops.hpcdecode.member_sum.default

# One tensor in, the same columns in the same places out.
UNCHANGED: frozenset[Target] = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.dropout.default,
        aten.lift_fresh_copy.default,
        aten.type_as.default,
    }
)
SPLITS: frozenset[Target] = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
# One tensor in, the same columns in other places out.
MOVES: frozenset[Target] = (
    VIEWS
    | SPLITS
    | {
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
    }
)
JOINS: frozenset[Target] = frozenset({aten.cat.default, aten.stack.default})  # a list of tensors in
LIKE: frozenset[Target] = frozenset(
    {aten.empty_like.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default}
)
NEW: frozenset[Target] = frozenset(
    {aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default}
)  # the tensor says the dtype alone
NORM = aten.linalg_vector_norm.default
REDUCTIONS: frozenset[Target] = frozenset(
    {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, NORM}
)
SUMMABLE: frozenset[Target] = frozenset({aten.mean.dim, aten.sum.dim_IntList})  # of REDUCTIONS: sums of parts
PROJECTIONS: frozenset[Target] = frozenset({aten.linear.default, aten.addmm.default, EXPERT_LINEAR})


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of a node's result depends on the elements at its place alone."""
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags or node.target in LIKE


def reduced_dims(node: fx.Node) -> list[int] | None:
    """Return the dimensions along which a reduction or a normalisation works, or None if a node is neither."""
    rank = len(tensor_meta(as_node(node.args[0])).shape) if node.args and isinstance(node.args[0], fx.Node) else 0
    if node.target in REDUCTIONS:
        place = 2 if node.target is NORM else 1
        stated = node.args[place] if len(node.args) > place else None
        dims = [as_int(d) for d in stated] if isinstance(stated, list | tuple) else []
        return [d % rank for d in dims] or list(range(rank))
    return normalised_dims(node, rank)


def normalised_dims(node: fx.Node, rank: int) -> list[int] | None:
    """Return the dimensions of `rank` along which a node normalises, or None if it is no normalisation."""
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        shape = node.args[1]
        return list(range(rank - len(shape), rank)) if isinstance(shape, list | tuple) else None
    if node.target in (aten.softmax.int, aten._softmax.default):
        return [as_int(node.args[1]) % rank]
    return None


def dim_argument(node: fx.Node, place: int, rank: int) -> int:
    """Return the argument number `place` of a node, a dimension of `rank`; 0 if it has no such argument."""
    return as_int(node.args[place]) % rank if len(node.args) > place else 0


@dataclass(frozen=True)
class Linear:
    """A call of PROJECTIONS.

    Attributes:
        node: The call.
        x: Activations, [..., in].
        weight: Weight.
        bias: Bias, or None.
        in_dim: Dimension of the weight that counts inputs.
        out_dim: Dimension of the weight that counts outputs.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    in_dim: int
    out_dim: int

    @classmethod
    def of(cls, node: fx.Node) -> Linear:
        """Return the projection that the call `node` is."""
        bias: Argument
        if node.target is EXPERT_LINEAR:
            x, _, weight, bias, transposed = node.args[:5]
            out_dim, in_dim = (2, 1) if transposed else (1, 2)
        elif node.target is aten.addmm.default:
            bias, x, weight = node.args
            out_dim, in_dim = 1, 0
        else:
            x, weight, bias = (*node.args, None)[:3]
            out_dim, in_dim = 0, 1
        return cls(node, as_node(x), as_node(weight), None if bias is None else as_node(bias), in_dim, out_dim)

    @property
    def weights(self) -> list[fx.Node]:
        """Return weight and bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def outputs(self) -> int:
        """Return the number of outputs."""
        return tensor_meta(self.node).one_token[-1]

    @property
    def one_row(self) -> bool:
        """Return whether one token has one row of inputs, or rows that are alike: those of its experts."""
        return self.node.target is EXPERT_LINEAR or tensor_meta(self.node).numel_per_token == self.outputs


def slice_argument(node: fx.Node) -> slice:
    """Return the indices that a slice takes, of a dimension whose size does not vary."""
    bounds = [*node.args[2:5], None, None, None][:3]
    return slice(*(None if each is None else as_int(each) for each in bounds))
