"""Grouped GEMMs where torch has none that runs without reading back: in blocks of rows that share an expert.

Every expert's rows are padded to whole blocks, whose number has a bound that does not depend on the choices. A block is
multiplied by a copy of its expert's matrix: weights are read, written and read again, a few blocks at a time, so that
the copies stay small. All GEMMs of a projection have one shape. Rows of padding hold any numbers, and nobody reads what
becomes of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ROWS = 64
BLOCKS_AT_ONCE = 16
COPIED_BYTES = 256 << 20  # of matrices at a time, if one is not larger


def by_blocks(rows: Tensor, weight: Tensor, transposed: bool, chosen: Tensor, ends: Tensor) -> Tensor:
    """Multiply sorted rows by the weights of their experts.

    Args:
        rows: Rows in the order of their experts, [rows, in].
        weight: Weights [E, out, in], or [E, in, out] if transposed.
        transposed: Whether they are [E, in, out].
        chosen: Expert of each row, int16 [rows]; numbers >= E have no weights here.
        ends: End of each expert's run, int32 [E].

    Returns:
        [rows, out], any numbers in rows of experts without weights here.
    """
    inputs, outputs = weight.shape[1:] if transposed else weight.shape[:0:-1]
    at_once = blocks_at_once(weight)
    calls = -(-most_blocks(len(rows), len(weight)) // at_once)
    own, place = _places(chosen, ends, calls * at_once)
    padded, y = (rows.new_empty(calls * at_once * BLOCK_ROWS + 1, columns) for columns in (inputs, outputs))
    padded.index_copy_(0, place, rows)
    parts = (x.narrow(0, 0, len(x) - 1).view(calls, at_once, BLOCK_ROWS, -1) for x in (padded, y))
    for x, out, experts in zip(*parts, own.view(calls, at_once), strict=True):
        matrices = weight.index_select(0, experts)
        torch.bmm(x, matrices if transposed else matrices.mT, out=out)
    return y.index_select(0, place)


def most_blocks(rows: int, experts: int) -> int:
    """Return the most blocks that rows can make, however they are dealt out to experts."""
    return (rows + min(rows, experts) * (BLOCK_ROWS - 1)) // BLOCK_ROWS


def blocks_at_once(weight: Tensor) -> int:
    """Return how many blocks one GEMM takes, whatever the number of rows."""
    return max(1, min(BLOCKS_AT_ONCE, COPIED_BYTES // (weight.shape[1] * weight.shape[2] * weight.element_size())))


def _places(chosen: Tensor, ends: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the expert of each block, int64 [blocks], and the place of each row in the blocks, int64 [rows].

    Rows of experts without weights here share the place behind all blocks.
    """
    begins, last = functional.pad(ends, (1, -1)), len(ends) - 1
    counts = (ends - begins + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    until = counts.cumsum(0)
    shift = (until - counts) * BLOCK_ROWS - begins
    number = torch.arange(len(chosen), device=chosen.device)
    place = number + shift.index_select(0, chosen.clamp(max=last).long())
    place = torch.where(chosen <= last, place, blocks * BLOCK_ROWS)
    own = torch.searchsorted(until, torch.arange(blocks, device=chosen.device), right=True)
    return own.clamp(max=last), place
