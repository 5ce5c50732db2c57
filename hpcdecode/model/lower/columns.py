"""Wide element-wise programs, a block of columns at a time, so that what they keep stays in the L1 cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcdecode._ops_cpu import Op
from hpcdecode.model.lower.instruction import Buffer, Instruction, Value

COLUMNS = 512
_REDUCTIONS = (Op.sum, Op.peak)


def in_columns(setup: Sequence[Instruction], body: list[Instruction]) -> list[Instruction]:
    """The same body in blocks of COLUMNS elements of a token; as it is where a step needs more than its own element."""
    columns = Columns(setup, body)
    return list(columns.instructions()) if columns.possible else body


class Columns:
    """A body whose steps are of one number alone, which come first, or of `width` elements, each by itself.

    What is loaded may be wider: of it every part that is read is loaded by itself.
    """

    def __init__(self, setup: Sequence[Instruction], body: list[Instruction]):
        self.singles = [i for i in body if max(i.dims) == 1]
        self.loads = {i.out.buffer: i for i in body if max(i.dims) > 1 and i.op is Op.load}
        self.wide = [i for i in body if max(i.dims) > 1 and i.op is not Op.load]
        self.width = self.wide[0].dims[2] if self.wide else 0
        self.whole = {v.buffer for i in (*setup, *self.singles) for v in i.operands}  # as they are for all columns
        self.blocks: dict[tuple[Buffer, int], Buffer] = {}  # one block after the other in the same memory

    @property
    def possible(self) -> bool:
        made = {i.out.buffer for i in self.wide if isinstance(i.out, Value)} | self.loads.keys()
        return self.width > COLUMNS and made.isdisjoint(self.whole) and all(map(self._by_element, self.wide))

    def _by_element(self, instruction: Instruction) -> bool:
        alike = tuple(instruction.dims) == (1, 1, self.width) and instruction.op not in _REDUCTIONS
        return alike and all(map(self._taken_in_order, instruction.operands))

    def _taken_in_order(self, value: Value) -> bool:
        if value.buffer in self.whole:
            return True
        return value.strides[-1] == 1 and (value.buffer in self.loads or value.buffer.size == self.width)

    def instructions(self) -> Iterator[Instruction]:
        yield from self.singles
        for first in range(0, self.width, COLUMNS):
            count = min(COLUMNS, self.width - first)
            loaded: set[Buffer] = set()
            for instruction in self.wide:
                for value in instruction.operands:
                    block = self._block(value)
                    if value.buffer in self.loads and block not in loaded:
                        loaded.add(block)
                        yield self._load(value, block, first, count)
                out, a, b = (self._view(v, first, count) for v in (instruction.out, instruction.a, instruction.b))
                yield replace(instruction, dims=(1, 1, count), first=first, out=out, a=a, b=b)

    def _block(self, value: Value) -> Buffer | None:
        if value.buffer in self.whole:
            return None
        return self.blocks.setdefault((value.buffer, value.offset), Buffer(COLUMNS))

    def _load(self, value: Value, block: Buffer, first: int, count: int) -> Instruction:
        load = self.loads[value.buffer]
        out = Value(block, (1, 1, count), (0, 0, 1))
        return replace(load, dims=(1, 1, count), first=value.offset + first, out=out)

    def _view(self, value: Value | int | None, first: int, count: int) -> Value | int | None:
        if not isinstance(value, Value):
            return value
        if value.buffer in self.whole:
            return replace(value, offset=value.offset + first * value.strides[-1])
        return Value(self._block(value), (1, 1, count), (0, 0, 1), narrow=value.narrow)
