"""Steps of a token program before their buffers have places in the scratch memory, and how they get them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hpcdecode._ops_cpu import Op, Step, Type
from hpcdecode.model.frontend.meta import dense_strides

LINE = 16  # floats of a cache line
TYPES = {torch.float32: Type.float32, torch.bfloat16: Type.bfloat16, torch.int8: Type.int8}

Shape = tuple[int, ...]


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
    """A step before its buffers have their places. out, a: a value, or the number of a tensor of the call, from its
    element `first` on."""

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
        return [v for v in (self.out, self.a, self.b) if isinstance(v, Value)]


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
        return v, (i.first, 0, 0)

    return Step(i.op, i.type, i.dims, *view(i.out), *view(i.a), *view(i.b), i.scalar)
