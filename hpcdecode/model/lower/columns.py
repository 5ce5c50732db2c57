"""Wide element-wise kernels, a block of columns at a time, so that what they keep stays in the L1 cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcdecode._ops_cpu import Op
from hpcdecode.model.lower.instruction import Buffer, Instruction, Value

COLUMNS = 512
_OF_ALL = (Op.sum, Op.peak, Op.most, Op.top, Op.pick, Op.mark, Op.rotate)  # columns of a token


def in_columns(setup: Sequence[Instruction], body: list[Instruction]) -> list[Instruction]:
    """Return the same body in blocks of COLUMNS elements of a token.

    Return `body` itself if a step needs more of a token than the elements of its own block.
    """
    columns = Columns(setup, body)
    return list(columns.instructions()) if columns.possible else body


class Columns:
    """A body that computes single numbers first, and then `width` elements, each by itself.

    Loaded tensors may be wider. Every part of them that is read is loaded by itself.

    Attributes:
        singles: Steps of one number.
        loads: Loads of several elements, by the buffer that they fill.
        wide: All other steps.
        width: Elements of a wide step.
        whole: Buffers that are the same for all blocks.
        blocks: Memory of the block of a value, by its buffer and offset; blocks use it in turn.
    """

    def __init__(self, setup: Sequence[Instruction], body: Sequence[Instruction]):
        self.singles = [i for i in body if max(i.dims) == 1]
        several = [i for i in body if max(i.dims) > 1]
        self.loads = {i.out.buffer: i for i in several if i.op is Op.load and isinstance(i.out, Value)}
        self.wide = [i for i in several if i.op is not Op.load]
        self.width = self.wide[0].dims[2] if self.wide else 0
        self.whole = {v.buffer for i in (*setup, *self.singles) for v in i.operands}
        self.blocks: dict[tuple[Buffer, int], Buffer] = {}

    @property
    def possible(self) -> bool:
        """Return True if the body can run block by block, and is wider than one block."""
        made = {i.out.buffer for i in self.wide if isinstance(i.out, Value)} | self.loads.keys()
        return self.width > COLUMNS and made.isdisjoint(self.whole) and all(map(self._by_element, self.wide))

    def _by_element(self, instruction: Instruction) -> bool:
        alike = tuple(instruction.dims) == (1, 1, self.width) and instruction.op not in _OF_ALL
        return alike and all(map(self._taken_in_order, instruction.operands))

    def _taken_in_order(self, value: Value) -> bool:
        if value.buffer in self.whole:
            return True
        return value.strides[-1] == 1 and (value.buffer in self.loads or value.buffer.size == self.width)

    def instructions(self) -> Iterator[Instruction]:
        """Yield the steps of one number, and then those of every block with the loads that they need."""
        yield from self.singles
        for first in range(0, self.width, COLUMNS):
            count = min(COLUMNS, self.width - first)
            loaded: set[Buffer] = set()
            for instruction in self.wide:
                for value in instruction.operands:
                    if value.buffer in self.loads and (block := self._block(value)) not in loaded:
                        loaded.add(block)
                        yield self._load(value, block, first, count)
                yield self._of_block(instruction, first, count)

    def _of_block(self, instruction: Instruction, first: int, count: int) -> Instruction:
        out, a, b = instruction.out, instruction.a, instruction.b
        return replace(
            instruction,
            dims=(1, 1, count),
            first=first,
            out=self._view(out, first, count) if isinstance(out, Value) else out,
            a=self._view(a, first, count) if isinstance(a, Value) else a,
            b=self._view(b, first, count) if b is not None else None,
        )

    def _block(self, value: Value) -> Buffer:
        return self.blocks.setdefault((value.buffer, value.offset), Buffer(COLUMNS))

    def _load(self, value: Value, block: Buffer, first: int, count: int) -> Instruction:
        load = self.loads[value.buffer]
        out = Value(block, (1, 1, count), (0, 0, 1))
        return replace(load, dims=(1, 1, count), first=value.offset + first, out=out)

    def _view(self, value: Value, first: int, count: int) -> Value:
        if value.buffer in self.whole:
            return replace(value, offset=value.offset + first * value.strides[-1])
        return Value(self._block(value), (1, 1, count), (0, 0, 1), narrow=value.narrow)
