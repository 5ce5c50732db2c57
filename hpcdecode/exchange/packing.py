"""Rows that an S-rank packs into the memory of a lane, such as those of q, k and v, and outputs that it unpacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode._ops_cpu import RowCopies
from hpcdecode.exchange.base import side_by_side
from hpcdecode.exchange.memory import Message
from hpcdecode.exchange.partition import RankColumns

_FEW_BYTES = 256 << 10  # beyond it torch's threads copy faster, if there are several


class Packing:
    """Rows of R-ranks that lie side by side in memory: one gather packs them, one scatter unpacks their answers.

    Args:
        messages: to one R-rank, or several one behind the other in memory and without prompts.
        columns: of rows and outputs that the R-rank has; None for all.
        device: of rows and outputs.
    """

    def __init__(self, messages: Sequence[Message], columns: RankColumns | None, device: torch.device):
        self.columns, piece = columns, messages[0].piece
        decode_rows = np.concatenate([message.piece.decode_rows for message in messages])
        self._rows = _index(decode_rows, device)
        self._prompt_rows = _index(piece.prefill_rows, device)
        self._packed = _merged([message.rows for message in messages])
        self._packed_prompts = messages[0].prompts
        self._answered = _merged([message.out for message in messages])
        self._few = _FewRows(decode_rows, self._packed, self._answered) if _are_few(self._packed, device) else None

    def pack(self, rows: Sequence[Tensor]) -> None:
        """Write the rows of q, k and v, or of what else tokens bring, to memory; of prompts all but the first, q."""
        if self.columns:
            rows = [x[:, own] for x, own in zip(rows, self.columns.rows, strict=True)]
        if self._few is None or not self._few.gather(rows):
            whole = side_by_side(*rows)
            _gather(rows if whole is None else (whole,), self._rows, self._packed)
        if len(self._packed_prompts):
            _gather(rows[1:], self._prompt_rows, self._packed_prompts)

    def unpack(self, o: Tensor) -> None:
        """Write what came back to the rows of o."""
        if self.columns:
            o = o[:, self.columns.o]
        if self._few is not None and self._few.scatter(o):
            return
        _scatter(self._answered, self._rows, o)


class _FewRows:
    """Copies of rows by one thread, which takes less time than calls of torch where rows are few.

    Args:
        rows: of the matrices, for each packed row.
        packed: memory of what is sent.
        answered: memory of what comes back.
    """

    def __init__(self, rows: NDArray[np.int64], packed: Tensor, answered: Tensor):
        self._rows, self._last, self._size = rows.tolist(), int(rows.max(initial=-1)), packed.element_size()
        self._packed = packed
        self._there: RowCopies | None = None  # made of the first blocks, whose columns all have
        self._back = RowCopies(self._rows, answered.data_ptr(), *self._bytes(answered))

    def gather(self, blocks: Sequence[Tensor]) -> bool:
        """Write the rows of blocks side by side to the packed ones; return whether that was possible."""
        self._require_rows(blocks[0])
        if self._there is None:
            size = self._size
            widths = [size * block.shape[1] for block in blocks]
            self._there = RowCopies(self._rows, self._packed.data_ptr(), self._packed.stride(0) * size, widths)
        return self._there.gather([x.data_ptr() for x in blocks], [x.stride() for x in blocks], self._size)

    def scatter(self, out: Tensor) -> bool:
        """Write the answers to the rows of out; return whether that was possible."""
        self._require_rows(out)
        return self._back.scatter([out.data_ptr()], [out.stride()], self._size)

    def _require_rows(self, matrix: Tensor) -> None:
        if len(matrix) <= self._last:
            raise IndexError(f"rows: expected more than {self._last}, got {len(matrix)}")

    def _bytes(self, matrix: Tensor) -> tuple[int, list[int]]:
        """Return the bytes from row to row, and of a row."""
        return matrix.stride(0) * self._size, [matrix.shape[1] * self._size]


def _are_few(packed: Tensor, device: torch.device) -> bool:
    """Return whether rows are copied here, in host memory."""
    copied_faster = packed.nbytes <= _FEW_BYTES or torch.get_num_threads() == 1
    return device.type == packed.device.type == "cpu" and copied_faster


def _merged(views: Sequence[Tensor]) -> Tensor:
    """Return matrices that follow each other in memory as one."""
    first = views[0]
    return first.as_strided((sum(map(len, views)), first.shape[1]), (first.shape[1], 1))


def _index(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Return an index of rows, a slice if they follow one another."""
    first = int(rows[0]) if len(rows) else 0
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return torch.from_numpy(rows).to(device)


def _gather(blocks: Sequence[Tensor], rows: slice | Tensor, out: Tensor) -> None:
    """Write `rows` of the blocks side by side to out."""
    if len(blocks) == 1:
        if isinstance(rows, slice):
            out.copy_(_rows(blocks[0], rows))
        else:
            torch.index_select(blocks[0], 0, rows, out=out)
        return
    at = 0
    for block in blocks:
        out[:, at : at + block.shape[1]] = block[rows]
        at += block.shape[1]


def _scatter(block: Tensor, rows: slice | Tensor, out: Tensor) -> None:
    """Write the block to `rows` of out."""
    if isinstance(rows, slice):
        _rows(out, rows).copy_(block)
        return
    whole = torch.complex128  # torch copies element by element here: the wider, the faster, by a factor of 6
    if block.shape[1] * block.element_size() % whole.itemsize == 0 and _takes(out, whole):
        block, out = block.view(whole), out.view(whole)
    out.index_copy_(0, rows, block)


def _rows(matrix: Tensor, rows: slice) -> Tensor:
    return matrix if matrix.shape[0] == rows.stop - rows.start else matrix[rows]


def _takes(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a matrix of this host's memory can be seen as one of `dtype`."""
    size = matrix.element_size()
    aligned = (matrix.stride(0) * size) % dtype.itemsize == 0 and (matrix.storage_offset() * size) % dtype.itemsize == 0
    return matrix.device.type == "cpu" and matrix.stride(1) == 1 and aligned
