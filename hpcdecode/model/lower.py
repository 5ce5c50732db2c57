"""From values and what is done with them to the steps of a token program (native/ops_cpu).

The token dimension counts as 1: what remains of a value is a small tensor that one token owns. A step rounds where the
node that it stands for does, so a program computes what the eager graph computes, up to the order of sums and the last
bits of exp, tanh and erf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from hpcdecode._ops_cpu import Op, Program, Step, Type
from hpcdecode.model.meta import dense_strides, meta

TYPES = {torch.float32: Type.float32, torch.bfloat16: Type.bfloat16}
LINE = 16  # floats of a cache line
MAX_STATIC = 1 << 16  # elements of a weight that a program may keep in its scratch memory

Shape = tuple[int, ...]


class Unlowerable(Exception):
    """The node has no steps: it runs as it is."""


@dataclass(eq=False)
class Buffer:
    """Scratch memory of one value, in floats."""

    size: int
    at: int = -1


@dataclass(frozen=True)
class Value:
    """A view of a buffer; shape and strides as torch has them, in floats."""

    buffer: Buffer
    shape: Shape
    strides: Shape
    offset: int = 0
    narrow: bool = False  # holds bfloat16 numbers only

    @property
    def dense(self) -> bool:
        dense = dense_strides(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, dense, strict=True))

    def reshaped(self, shape: Shape) -> Value:
        """The same elements in the same order; for a dense value."""
        return replace(self, shape=shape, strides=dense_strides(shape))

    def part(self, dim: int, start: int, length: int, step: int = 1) -> Value:
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = len(range(0, length, step)), strides[dim] * step
        offset = self.offset + start * self.strides[dim]
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)


@dataclass
class Instruction:
    """A step before its buffers have their places. out, a: a value, or the number of a tensor of the call."""

    op: Op
    type: Type
    dims: Shape
    out: Value | int
    a: Value | int
    b: Value | None = None
    scalar: float = 0.0

    @property
    def operands(self) -> list[Value]:
        return [v for v in (self.out, self.a, self.b) if isinstance(v, Value)]


class Lowering:
    """The steps of one region of a graph, collected node by node."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, Value | list[Value]] = {}
        self.setup: list[Instruction] = []
        self.body: list[Instruction] = []

    def load(self, node: fx.Node, tensor: int) -> None:
        """Let `node` be tensor number `tensor` of the call: rows of tokens, or a weight."""
        about = meta(node)
        shape = about.one_token
        value = fresh(shape, about.dtype == torch.bfloat16)
        steps = self.setup if about.static else self.body
        steps.append(Instruction(Op.load, TYPES[about.dtype], (1, 1, math.prod(shape)), value, tensor))
        self.values[node] = value

    def store(self, node: fx.Node, tensor: int) -> None:
        value, kind = self.values[node], TYPES[meta(node).dtype]
        if kind is Type.bfloat16 and not value.narrow:
            value = self.step(Op.copy, value.shape, value, narrow=True)
        value = self.packed(value)
        self.body.append(Instruction(Op.store, kind, (1, 1, math.prod(value.shape)), tensor, value))

    def step(self, op: Op, shape: Shape, a: Value, b: Value | float | None = None, narrow: bool = False) -> Value:
        """out[...] = op(a[...], b[...]), broadcast to `shape` and rounded to bfloat16 if `narrow`."""
        out = fresh(shape, narrow)
        self.emit(op, out, a, b, narrow)
        return out

    def emit(self, op: Op, out: Value, a: Value, b: Value | float | None = None, narrow: bool = False) -> None:
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

    def sum(self, a: Value, shape: Shape, scale: float, narrow: bool) -> Value:
        """Sum over the last dimension, times `scale`."""
        a = self.packed(a)
        out, rows, width = fresh(shape, narrow), math.prod(a.shape[:-1]), a.shape[-1]
        kind = Type.bfloat16 if narrow else Type.float32
        views = [replace(v, shape=(1, rows, n), strides=(0, n, 1)) for v, n in ((out, 1), (a, width))]
        self.body.append(Instruction(Op.sum, kind, (1, rows, width), views[0], views[1], None, scale))
        return out

    def packed(self, value: Value) -> Value:
        return value if value.dense else self.step(Op.copy, value.shape, value, narrow=False)

    def finish(self, isa: str, tensors: int) -> Program:
        """Give every buffer its place, dead ones' places to new ones, and build the native program."""
        scratch = place(self.setup, self.body)
        return Program(list(map(native, self.setup)), list(map(native, self.body)), scratch, tensors, isa)


def fresh(shape: Shape, narrow: bool = False) -> Value:
    return Value(Buffer(math.prod(shape)), shape, dense_strides(shape), 0, narrow)


def broadcast(value: Value, shape: Shape) -> Value:
    lead = len(shape) - len(value.shape)
    sizes = (1,) * lead + value.shape
    strides = (0,) * lead + value.strides
    if any(n not in (1, want) for n, want in zip(sizes, shape, strict=True)):
        raise Unlowerable
    return replace(value, shape=shape, strides=tuple(0 if n == 1 else s for n, s in zip(sizes, strides, strict=True)))


def coalesced(shape: Shape, strides: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """The fewest dimensions, at least 3, that walk all operands: neighbours merge where every operand allows it."""
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


def place(setup: list[Instruction], body: list[Instruction]) -> int:
    """Set every buffer's place; those of the setup stay for good. Returns the floats of scratch memory needed."""
    end = 0
    for instruction in setup:
        for value in instruction.operands:
            value.buffer.at, end = end, end + padded(value.buffer)
    last = {v.buffer: i for i, instruction in enumerate(body) for v in instruction.operands}
    free: list[tuple[int, int]] = []  # (size, place)
    for i, instruction in enumerate(body):
        buffers = list(dict.fromkeys(v.buffer for v in instruction.operands))
        for buffer in buffers:
            if buffer.at >= 0:
                continue
            need = padded(buffer)
            fitting = [hole for hole in free if hole[0] == need]
            if fitting:
                free.remove(fitting[-1])
                buffer.at = fitting[-1][1]
            else:
                buffer.at, end = end, end + need
        free += [(padded(b), b.at) for b in buffers if last[b] == i and b.at >= 0 and not is_static(b, setup)]
    return end


def is_static(buffer: Buffer, setup: list[Instruction]) -> bool:
    return any(v.buffer is buffer for instruction in setup for v in instruction.operands)


def padded(buffer: Buffer) -> int:
    return -(-buffer.size // LINE) * LINE


def native(i: Instruction) -> Step:
    def view(v: Value | int | None) -> tuple[int | None, Shape]:
        if isinstance(v, Value):
            return v.buffer.at + v.offset, v.strides if len(v.strides) == 3 else (0, 0, 1)
        return v, (0, 0, 0)

    return Step(i.op, i.type, i.dims, *view(i.out), *view(i.a), *view(i.b), i.scalar)
