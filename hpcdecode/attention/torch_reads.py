"""What a call of a KV cache in torch reads: which rows lie where, as tensors of the device.

A token that attends is a row. The positions that it sees are read in chunks of `CHUNK` tokens that lie at absolute
positions. A chunk of a row is an item. Items are attended to in groups of one size, the last of which is padded, so
that every product has the same shape. The results of a row's chunks are merged as a tree of `RADIX` branches, whose
forks lie at absolute positions, too. So a row's sums do not depend on what else is in the call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.shapes import LayerShape

CHUNK = 512  # tokens
RADIX = 8

Longs = NDArray[np.int64]


class RowPlaces(NamedTuple):
    """The rows of a call.

    Attributes:
        sequences: Index of each row's sequence, int64 [T].
        positions: Of each row in its sequence, int64 [T].
        blocks: Block ids of the sequences in order, int32 [n, most].
        block_tokens: Tokens of a block.
    """

    sequences: Longs
    positions: Longs
    blocks: NDArray[np.int32]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Some rows of a call, and what they read. Tensors are on the device.

    Attributes:
        rows: The rows.
        group: Items of a group.
        places: Place of every token of every item, int32 [items, CHUNK]; of those that a row does not see any place
            of its own sequence. Items are whole groups.
        hidden: True for tokens that the item's row does not see, [items, CHUNK].
        queries: Row of every item, from the first of the wave, int32 [items].
        levels: For every level of the tree the results of the one before, items at first, that become one, int32
            [branches, results + 1] with at most RADIX branches. The last result stands for nothing, as does the one
            behind the last item. Those of the last level are the rows'.
        distances: Of every token from the item's row, int32 [items, CHUNK], for layers with biases.
    """

    rows: slice
    group: int
    places: Tensor
    hidden: Tensor
    queries: Tensor
    levels: tuple[Tensor, ...]
    distances: Tensor | None = None

    @property
    def items(self) -> int:
        """Return the number of items, padding included."""
        return len(self.queries)

    def at(self, places: Tensor) -> Wave:
        """Return the same with other places, int32 [items, CHUNK]."""
        return replace(self, places=places)


def waves(rows: RowPlaces, shape: LayerShape, group: int, most: int, device: torch.device) -> list[Wave]:
    """Return what all rows of a call read of a layer.

    Args:
        rows: The rows.
        shape: Of the layer.
        group: Items of a group.
        most: Items of a wave, unless a row has more.
        device: Of the tensors.
    """
    low = shape.first_seen(rows.positions)
    first, last = low // CHUNK, rows.positions // CHUNK
    ends = np.cumsum(last - first + 1)
    found, begin = [], 0
    while begin < len(ends):
        before = ends[begin - 1] if begin else 0
        end = max(int(np.searchsorted(ends, before + most, side="right")), begin + 1)
        found.append(_wave(rows, slice(begin, end), low, first, last, group, device, shape.bias is not None))
        begin = end
    return found


def _wave(
    rows: RowPlaces,
    own: slice,
    low: Longs,
    first: Longs,
    last: Longs,
    group: int,
    device: torch.device,
    biased: bool,
) -> Wave:
    counts = last[own] - first[own] + 1
    real = int(counts.sum())
    items = -(-real // group) * group
    queries = np.zeros(items, np.int64)  # padding reads what the first row sees, for nobody
    queries[:real] = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    chunks = np.full(items, first[own][0])
    chunks[:real] = np.arange(real) - np.repeat(begins - first[own], counts)
    of = own.start + queries
    levels = _levels(queries[:real], chunks[:real], items, len(counts))
    width = rows.blocks.shape[1]
    numbers = (rows.sequences[of] * width, chunks * CHUNK, low[of], rows.positions[of], queries, rows.blocks.ravel())
    sent = to_device([*numbers, *(level.ravel() for level in levels)], device)
    bases, begins_at, lowest, positions, rows_of, blocks = sent[: len(numbers)]
    at = begins_at[:, None] + torch.arange(CHUNK, dtype=torch.int32, device=device)
    hidden = (at < lowest[:, None]) | (at > positions[:, None])
    at = torch.minimum(at, positions[:, None])
    ids = blocks.index_select(0, (bases[:, None] + at // rows.block_tokens).flatten()).view_as(at)
    places = ids * rows.block_tokens + at % rows.block_tokens
    trees = [sent_level.view(level.shape) for sent_level, level in zip(sent[len(numbers) :], levels, strict=True)]
    return Wave(own, group, places, hidden, rows_of, tuple(trees), positions[:, None] - at if biased else None)


def _levels(queries: Longs, chunks: Longs, items: int, rows: int) -> list[Longs]:
    """Return the levels of the tree for items of rows and chunks, those of a row in order; see `Wave.levels`."""
    levels, nothing = [], items
    while True:
        parents = chunks // RADIX
        new = np.ones(len(queries), np.bool_)
        new[1:] = (queries[1:] != queries[:-1]) | (parents[1:] != parents[:-1])
        index = np.cumsum(new) - 1
        count = int(index[-1]) + 1 if len(index) else 0
        level = np.full((RADIX, count + 1), nothing)
        level[chunks % RADIX, index] = np.arange(len(queries))
        levels.append(level[(level != nothing).any(1)])  # nothing more is added in their place
        queries, chunks, nothing = queries[new], parents[new], count
        if count == rows:
            return levels


def to_device(arrays: list[NDArray[np.int64] | NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Return arrays of one dimension as int32 tensors on the device, by one copy that nobody waits for."""
    joined = torch.from_numpy(np.concatenate(arrays).astype(np.int32))
    if device.type == "cuda" and torch.cuda.is_available():
        joined = joined.pin_memory()  # torch keeps it until it has been read
    return list(joined.to(device, non_blocking=True).split([len(array) for array in arrays]))
