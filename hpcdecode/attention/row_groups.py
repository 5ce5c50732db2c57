"""Rows of a call that attends to them in groups: which pages each needs, and its part of tensors."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpcdecode._attn_cpu import KvCache
from hpcdecode.attention.base import IntArray, Matrix
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.pages import Marks
from hpcdecode.system.tier import Chunk

Ints = NDArray[np.int32]


class RowsWritten(NamedTuple):
    """What rows need and write, of a layer.

    Attributes:
        needs: bool [n, ranges], the ranges that each needs.
        some: bool [ranges], those that any needs.
        ends: int64 [n], ends of the rows' tokens.
        grow: Whether all rows have one new token.
        blocks: int32 [n], the block that gets a row's one new token; -1 for rows with other numbers of them.
        tokens: int32 [n], which token of the block that is.
    """

    needs: Marks
    some: Marks
    ends: NDArray[np.int64]
    grow: bool
    blocks: Ints
    tokens: Ints


def any_of(marks: Marks) -> Marks:
    """Return which ranges some row needs, bool [ranges]."""
    some: Marks = np.logical_or.reduce(marks, axis=0)
    return some


def ints(values: IntArray) -> Ints:
    """Return int32 numbers that lie in order."""
    return np.ascontiguousarray(values, np.int32)


def tokens_of(ends: NDArray[np.int64], counts: Ints, group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens of a group of rows, given the ends of all rows' tokens."""
    if (counts == 1).all():
        return group
    return np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in group.tolist()])


def as_array(matrix: Matrix) -> NDArray[Any]:
    """Return a matrix as an array, for numpy to copy rows: few of them, for which torch would wake threads."""
    if not isinstance(matrix, torch.Tensor):
        return matrix
    array: NDArray[Any] = (matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix).numpy()
    return array


def rows_at(matrix: Matrix, rows: NDArray[np.int64]) -> torch.Tensor:
    """Return a copy of some rows."""
    some = torch.from_numpy(as_array(matrix)[rows])
    return some.view(matrix.dtype) if isinstance(matrix, torch.Tensor) else some


def frames_of(native: KvCache, sizes: PageSizes) -> list[Chunk]:
    """Return the memory of every frame."""
    whole = (ctypes.c_uint8 * (sizes.page_bytes * sizes.frames)).from_address(native.address)
    return list(np.ctypeslib.as_array(whole).reshape(sizes.frames, sizes.page_bytes))
