"""From nodes of a graph to the steps of a fused element-wise kernel (native/ops_cpu).

The token dimension counts as 1: what remains of a tensor is a small one that a single token owns. A step rounds where
its node does. So a kernel computes what the eager graph computes, up to the order of sums and the last bits of exp,
tanh and erf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from hpcdecode._ops_cpu import FusedKernel, Op, Type
from hpcdecode.model.frontend.meta import dense_strides, tensor_meta
from hpcdecode.model.lower.columns import in_columns
from hpcdecode.model.lower.instruction import MEMORY, Buffer, Instruction, Shape, Value, native, place

MAX_STATIC = 1 << 16  # elements of a weight that a kernel may keep in its scratch memory


class Unlowerable(Exception):
    """A node has no steps: it runs as it is."""


class Lowering:
    """The steps of one region of a graph, collected node by node.

    Attributes:
        values: The value of every node that has one.
        parts: The values of every node that computes several tensors.
        setup: Steps that run once a thread.
        body: Steps that run once a token.
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Value] = {}
        self.parts: dict[fx.Node, list[Value]] = {}
        self.setup: list[Instruction] = []
        self.body: list[Instruction] = []

    def operand(self, argument: object) -> Value:
        """Return the value of an argument.

        Raises:
            Unlowerable: If it is not a node that has one value.
        """
        if not isinstance(argument, fx.Node) or argument not in self.values:
            raise Unlowerable
        return self.values[argument]

    def record(self, node: fx.Node, made: Value | list[Value]) -> None:
        """Let `made` be the value, or the values, of `node`."""
        if isinstance(made, Value):
            self.values[node] = made
        else:
            self.parts[node] = made

    def load(self, node: fx.Node, tensor: int) -> None:
        """Let `node` be tensor number `tensor` of the call: rows of tokens, or a weight."""
        about = tensor_meta(node)
        shape = about.one_token
        value = replace(fresh(shape, about.dtype == torch.bfloat16), flag=about.dtype == torch.bool)
        steps = self.setup if about.static else self.body
        steps.append(Instruction(Op.load, MEMORY[about.dtype], (1, 1, math.prod(shape)), value, tensor))
        self.values[node] = value

    def store(self, node: fx.Node, tensor: int) -> None:
        """Write the value of `node` to tensor number `tensor` of the call."""
        value, kind = self.values[node], MEMORY[tensor_meta(node).dtype]
        if kind is Type.bfloat16 and not value.narrow:
            value = self.step(Op.copy, value.shape, value, narrow=True)
        value = self.packed(value)
        self.body.append(Instruction(Op.store, kind, (1, 1, math.prod(value.shape)), tensor, value))

    def step(self, op: Op, shape: Shape, a: Value, b: Value | float | None = None, narrow: bool = False) -> Value:
        """Append the step out[...] = op(a[...], b[...]).

        Args:
            op: Element-wise operation.
            shape: Shape of the result, to which the operands are broadcast.
            a: First operand.
            b: Second operand, if the operation has one.
            narrow: Round the result to bfloat16.

        Returns:
            The result.
        """
        out = fresh(shape, narrow)
        self.emit(op, out, a, b, narrow)
        return out

    def emit(self, op: Op, out: Value, a: Value, b: Value | float | None = None, narrow: bool = False) -> None:
        """Append a step that writes to `out`; see `step`."""
        operands = [broadcast(v, out.shape) for v in (a, b) if isinstance(v, Value)]
        dims, strides = coalesced(out.shape, [v.strides for v in (out, *operands)])
        if len(dims) > 3:
            raise Unlowerable
        inner = (0, 1) if b is not None else (1,)
        if op is not Op.copy and any(s[-1] not in inner for s in strides[1:]):
            packed = [self.packed(v) for v in operands]
            return self.emit(op, out, packed[0], packed[1] if len(packed) > 1 else b, narrow)
        views = [replace(v, shape=dims, strides=s) for v, s in zip((out, *operands), strides, strict=True)]
        kind = Type.bfloat16 if narrow else Type.float32
        scalar = float(b) if isinstance(b, float | int) else 0.0
        self.body.append(Instruction(op, kind, dims, views[0], views[1], views[2] if len(views) > 2 else None, scalar))

    def reduce(self, op: Op, a: Value, shape: Shape, scale: float, narrow: bool = False) -> Value:
        """Append the reduction of `a` over its last dimension.

        Args:
            op: Op.sum, Op.most for the largest, or Op.peak for the largest magnitude.
            a: Operand.
            shape: Shape of the result.
            scale: Factor of the result.
            narrow: Round the result to bfloat16.

        Returns:
            The result.
        """
        a = self.packed(a)
        out, rows, width = fresh(shape, narrow), math.prod(a.shape[:-1]), a.shape[-1]
        kind = Type.bfloat16 if narrow else Type.float32
        views = [replace(v, shape=(1, rows, n), strides=(0, n, 1)) for v, n in ((out, 1), (a, width))]
        self.body.append(Instruction(op, kind, (1, rows, width), views[0], views[1], None, scale))
        return out

    def top(self, a: Value, count: int) -> Value:
        """Append the search for the places of the largest elements of the last dimension, the largest first.

        Args:
            a: Operand.
            count: Number of places.

        Returns:
            The places, whole numbers.
        """
        a = self.packed(a)
        out = fresh((*a.shape[:-1], count))
        self._by_place(Op.top, out, a)
        return out

    def pick(self, a: Value, places: Value) -> Value:
        """Append the choice of the elements of the last dimension at some places, and return them.

        Args:
            a: Operand.
            places: Whole numbers. All dimensions but the last are those of `a`.
        """
        a, places = self.packed(a), self.packed(places)
        out = fresh(places.shape, a.narrow)
        self._by_place(Op.pick, out, a, places)
        return out

    def mark(self, places: Value, shape: Shape) -> Value:
        """Append what is 1 at some places of the last dimension, and 0 elsewhere, and return it.

        Args:
            places: Whole numbers.
            shape: Shape of the result, of which all dimensions but the last are those of `places`.
        """
        out, places = replace(fresh(shape), flag=True), self.packed(places)
        self._by_place(Op.mark, out, places)
        return out

    def fill(self, a: Value, flags: Value, number: float) -> Value:
        """Append what is `number` where a flag is set, and `a` elsewhere, and return it."""
        out = fresh(a.shape)
        a, flags = (self.packed(broadcast(v, a.shape)) for v in (a, flags))
        rows = (1, 1, math.prod(a.shape))
        views = [replace(v, shape=rows, strides=(0, 0, 1)) for v in (out, a, flags)]
        self.body.append(Instruction(Op.fill, Type.float32, rows, views[0], views[1], views[2], number))
        return out

    def _by_place(self, op: Op, out: Value, a: Value, places: Value | None = None) -> None:
        rows, count, width = math.prod(out.shape[:-1]), out.shape[-1], a.shape[-1]
        views = [
            replace(v, shape=(1, rows, n), strides=(0, n, 1))
            for v, n in ((out, count), (a, width), *([] if places is None else [(places, count)]))
        ]
        dims, given = (1, rows, count), views[2] if places is not None else None
        self.body.append(Instruction(op, Type.float32, dims, views[0], views[1], given, float(width)))

    def rotate(self, a: Value, runs: int, size: int) -> Value:
        """Append the product of every runs * size elements of `a` with an orthogonal matrix.

        Args:
            a: Operand.
            runs: Order of the Hartley matrix.
            size: Order of the Hadamard matrix.

        Returns:
            The product, float32.
        """
        a = self.packed(a)
        out, dims = fresh(a.shape), (math.prod(a.shape) // (runs * size), runs, size)
        to, given = (replace(v, shape=dims, strides=dense_strides(dims)) for v in (out, a))
        self.body.append(Instruction(Op.rotate, Type.float32, dims, to, given, None, 1 / math.sqrt(size)))
        return out

    def packed(self, value: Value) -> Value:
        """Return the value if it is dense, else a dense copy."""
        return value if value.dense else replace(self.step(Op.copy, value.shape, value, narrow=False), flag=value.flag)

    def finish(self, isa: str, tensors: int) -> FusedKernel:
        """Return the native kernel of the steps.

        Args:
            isa: Instruction set to use.
            tensors: Number of tensors of a call.
        """
        body = in_columns(self.setup, self.body)
        scratch = place(self.setup, body)
        return FusedKernel(list(map(native, self.setup)), list(map(native, body)), scratch, tensors, isa)


def fresh(shape: Shape, narrow: bool = False) -> Value:
    """Return a dense value in a buffer of its own."""
    return Value(Buffer(math.prod(shape)), shape, dense_strides(shape), 0, narrow)


def broadcast(value: Value, shape: Shape) -> Value:
    """Return a view of the value as a tensor of `shape`, as torch broadcasts it.

    Raises:
        Unlowerable: If torch would not.
    """
    lead = len(shape) - len(value.shape)
    sizes = (1,) * lead + value.shape
    strides = (0,) * lead + value.strides
    if any(n not in (1, want) for n, want in zip(sizes, shape, strict=True)):
        raise Unlowerable
    return replace(value, shape=shape, strides=tuple(0 if n == 1 else s for n, s in zip(sizes, strides, strict=True)))


def coalesced(shape: Shape, strides: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """Merge neighbouring dimensions where every operand's strides allow it.

    Args:
        shape: Shape of all operands.
        strides: Strides of every operand.

    Returns:
        The fewest dimensions, at least 3, that visit all elements, and the strides of every operand for them.
    """
    dims: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        if dims and all(s[d] == k[0] * dims[0] for s, k in zip(strides, kept, strict=True)):
            dims[0] *= shape[d]
            continue
        dims.insert(0, shape[d])
        for s, k in zip(strides, kept, strict=True):
            k.insert(0, s[d])
    if not dims:
        dims, kept = [1], [[1] for _ in strides]
    lead = 3 - len(dims)
    return (1,) * lead + tuple(dims), [(0,) * lead + tuple(k) for k in kept]
