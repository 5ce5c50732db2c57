"""Steps of a fused element-wise kernel before their buffers lie in the scratch memory, and where they come to lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hpcdecode._ops_cpu import Op, Step, Type
from hpcdecode.model.frontend.meta import dense_strides

LINE = 16  # floats of a cache line
TYPES = {torch.float32: Type.float32, torch.bfloat16: Type.bfloat16, torch.int8: Type.int8}
MEMORY = {**TYPES, torch.int64: Type.int64, torch.bool: Type.int8}  # of places, and of flags

Shape = tuple[int, ...]


@dataclass(eq=False)
class Buffer:
    """Scratch memory of one value.

    Attributes:
        size: Floats that it holds.
        at: First float in the scratch memory, or -1 before `place`.
    """

    size: int
    at: int = -1


@dataclass(frozen=True)
class Value:
    """A strided view of a buffer.

    Attributes:
        buffer: Memory that holds the elements.
        shape: Sizes of the view's dimensions.
        strides: Floats from one element to the next, by dimension.
        offset: Floats from the begin of the buffer to the first element.
        narrow: True if every element is a bfloat16 number.
        flag: True if every element is 0 or 1.
    """

    buffer: Buffer
    shape: Shape
    strides: Shape
    offset: int = 0
    narrow: bool = False
    flag: bool = False

    @property
    def dense(self) -> bool:
        """Return True if the elements follow on each other without gaps."""
        dense = dense_strides(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, dense, strict=True))

    def reshaped(self, shape: Shape) -> Value:
        """Return a view of another shape with the same elements in the same order. The value must be dense."""
        return replace(self, shape=shape, strides=dense_strides(shape))

    def part(self, dim: int, start: int, length: int, step: int = 1) -> Value:
        """Return a view of every `step`-th element among `length` elements of dimension `dim` from `start` on."""
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = len(range(0, length, step)), strides[dim] * step
        offset = self.offset + start * self.strides[dim]
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)


@dataclass
class Instruction:
    """A native Step before its buffers have their places.

    Attributes:
        op: Operation.
        type: Type that results are rounded to; for load and store that of the tensor.
        dims: Three sizes.
        out: Result, or for a store the index of the tensor written.
        a: First operand, or for a load the index of the tensor read.
        b: Second operand, or None for `scalar`.
        scalar: Second operand if `b` is None; for a reduction its factor; the width of `a` for top and pick.
        first: First element of the tensor that is loaded or stored.
    """

    op: Op
    type: Type
    dims: Shape
    out: Value | int
    a: Value | int
    b: Value | None = None
    scalar: float = 0.0
    first: int = 0

    @property
    def operands(self) -> list[Value]:
        """Return the values that the step reads and writes."""
        return [v for v in (self.out, self.a, self.b) if isinstance(v, Value)]


def place(setup: Sequence[Instruction], body: Sequence[Instruction]) -> int:
    """Set the place of every buffer in the scratch memory.

    A buffer of the body takes the place of one that is read no more. Buffers of the setup keep theirs.

    Returns:
        Floats of scratch memory needed.
    """
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


def is_static(buffer: Buffer, setup: Sequence[Instruction]) -> bool:
    """Return True if a step of the setup uses the buffer."""
    return any(v.buffer is buffer for instruction in setup for v in instruction.operands)


def padded(buffer: Buffer) -> int:
    """Return the floats of the cache lines that the buffer fills."""
    return -(-buffer.size // LINE) * LINE


def native(i: Instruction) -> Step:
    """Return the native step of an instruction whose buffers have their places."""
    out, a = _operand(i.out, i.first), _operand(i.a, i.first)
    b, b_strides = (None, (0, 0, 0)) if i.b is None else _operand(i.b, i.first)
    return Step(i.op, i.type, i.dims, *out, *a, b, b_strides, i.scalar)


def _operand(operand: Value | int, first: int) -> tuple[int, Shape]:
    if isinstance(operand, int):
        return operand, (first, 0, 0)
    strides = operand.strides if len(operand.strides) == 3 else (0, 0, 1)
    return operand.buffer.at + operand.offset, strides
