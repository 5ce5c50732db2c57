"""Rows of a layer packed on a device, and outputs unpacked there: one gather and one scatter for all R-ranks.

A lane's rows [q | k | v] are cut into blocks of as many columns as all stretches that R-ranks have are multiples of. So
one `index_select` of blocks brings them into the order of the messages, those of prompts and of heads too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.exchange.base import PackedRows, Parcel, side_by_side
from hpcdecode.exchange.device import Accelerator, Pairs

Span = tuple[int, int]  # first column, last + 1


class Blocks(NamedTuple):
    """Places of blocks in a matrix that is contiguous, in the order in which they are packed.

    Attributes:
        columns: Of a block.
        places: int64 [n], number of each block in the matrix.
    """

    columns: int
    places: NDArray[np.int64]


def row_blocks(packed: Sequence[PackedRows], shape: MixerShape) -> Blocks:
    """Return the blocks of a layer's rows, of `shape` as a whole, in the order of the messages."""
    widths = _widths(shape)
    pieces = []
    for each in packed:
        own = each.columns.rows if each.columns else tuple(slice(0, width) for width in widths)
        spans = _spans(own, widths)
        pieces.append((each.piece.decode_rows, spans))
        if len(each.piece.prefill_rows):
            pieces.append((each.piece.prefill_rows, _spans((slice(0, 0), *own[1:]), widths)))
    return _blocks(pieces, sum(widths))


def output_blocks(packed: Sequence[PackedRows], shape: MixerShape) -> Blocks:
    """Return the blocks of a layer's output, of `shape` as a whole, in the order of the answers."""
    width = shape.out_columns
    own = [each.columns.o if each.columns else slice(0, width) for each in packed]
    pieces = [(each.piece.decode_rows, [(o.start, o.stop)]) for each, o in zip(packed, own, strict=True)]
    return _blocks(pieces, width)


def _widths(shape: MixerShape) -> list[int]:
    """Return the columns of each matrix that a layer's tokens bring."""
    if isinstance(shape, LayerShape):
        return [shape.q_columns, shape.k_columns, shape.v_columns]
    return [width for width in shape.widths if width]


def _spans(own: Sequence[slice], widths: Sequence[int]) -> list[Span]:
    """Return the columns of matrices side by side that are some of each one's own."""
    found: list[Span] = []
    for part, start in zip(own, accumulate(widths, initial=0), strict=False):
        first, last = part.start + start, part.stop + start
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        elif first < last:
            found.append((first, last))
    return found


def _blocks(pieces: Sequence[tuple[NDArray[np.int64], list[Span]]], width: int) -> Blocks:
    columns = gcd(width, *(bound for _, spans in pieces for span in spans for bound in span))
    in_row = [[np.arange(first // columns, last // columns) for first, last in spans] for _, spans in pieces]
    none = np.empty(0, np.int64)
    places = [
        np.add.outer(rows * (width // columns), np.concatenate([none, *own])).ravel()
        for (rows, _), own in zip(pieces, in_row, strict=True)
    ]
    return Blocks(columns, np.concatenate([none, *places]))


def merged(memories: Sequence[Tensor]) -> list[Tensor]:
    """Return memory [n] as fewer tensors, where one begins in the same storage at which the one before ends."""
    found: list[Tensor] = []
    for memory in memories:
        if not len(memory):
            continue
        last = found[-1] if found else None
        if last is not None and _follows(memory, last):
            found[-1] = last.as_strided((len(last) + len(memory),), (1,))
        else:
            found.append(memory)
    return found


def _follows(memory: Tensor, last: Tensor) -> bool:
    same = memory.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and memory.storage_offset() == last.storage_offset() + len(last)


class Images:
    """Memory of a lane on a device, of what leaves and of what comes back, kept from layer to layer."""

    def __init__(self, device: Accelerator):
        self.device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory [size]; the lane's work over what was there before must be done."""
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = self.device.empty(size + size // 4, dtype)
        return self._memory[name][:size]


class LayerImages:
    """How the layers of one shape cross in a step.

    Args:
        parcels: In the order of sending.
        shape: Of the whole layer.
        images: Of the lane.
        dtype: Of rows and outputs.

    Attributes:
        parts: Copies from the device to the memory of each parcel; None if rows are packed where MPI sends them from.
        back: Copies to the device of what came back.
        answers: Memory of what comes back.
    """

    def __init__(self, parcels: Sequence[Parcel], shape: MixerShape, images: Images, dtype: torch.dtype):
        self.parcels = parcels
        packed = [rows for parcel in parcels for rows in parcel.packed]
        self._rows, self._outputs = row_blocks(packed, shape), output_blocks(packed, shape)
        self._there, self._took_there = _image("there", [p.sent for p in packed], images, dtype)
        self._back, took_back = _image("back", [p.answered for p in packed], images, dtype)
        self.parts = list(self._cut()) if self._took_there else None
        self.answers = merged([p.answered for p in packed])
        self.back: Pairs = list(_pairs(self._back, self.answers)) if took_back else []
        self._indices: tuple[slice | Tensor, slice | Tensor] | None = None

    def _cut(self) -> Iterator[Pairs]:
        """Yield the copies of each parcel, from the device."""
        at = 0
        for parcel in self.parcels:
            targets = merged([rows.sent for rows in parcel.packed])
            size = sum(map(len, targets))
            yield [(host, there) for there, host in _pairs(self._there[at : at + size], targets)]
            at += size

    @staticmethod
    def upload_all(layers: Sequence[LayerImages], device: Accelerator) -> None:
        """Copy the places of all blocks to the device, by one copy."""
        places = [blocks.places for layer in layers for blocks in (layer._rows, layer._outputs)]
        indices = [_range(each) for each in places]
        sent = [each for each, index in zip(places, indices, strict=True) if index is None]
        there = iter(device.upload(np.concatenate(sent)).split(list(map(len, sent))) if sent else ())
        found = [next(there) if index is None else index for index in indices]
        for layer, gathered, scattered in zip(layers, found[::2], found[1::2], strict=True):
            layer._indices = gathered, scattered

    def gather(self, rows: Sequence[Tensor]) -> None:
        """Write rows [T, columns] side by side and in the order of the messages."""
        assert self._indices is not None, "expected places on the device"
        index, columns = self._indices[0], self._rows.columns
        whole, out = side_by_side(*rows), self._there.view(-1, columns)
        if whole is None or not whole.is_contiguous():
            if isinstance(index, slice) and out.numel() == sum(x.numel() for x in rows):
                torch.cat(list(rows), 1, out=out.view(len(rows[0]), -1))
                return
            whole = torch.cat(list(rows), 1)
        blocks = whole.view(-1, columns)
        if isinstance(index, slice):
            out.copy_(blocks[index])
        else:
            torch.index_select(blocks, 0, index, out=out)

    def scatter(self, o: Tensor) -> None:
        """Write what came back to the rows and columns of o [T, columns] that it belongs to."""
        assert self._indices is not None, "expected places on the device"
        index, columns = self._indices[1], self._outputs.columns
        whole = o if o.is_contiguous() else o.contiguous()
        blocks, back = whole.view(-1, columns), self._back.view(-1, columns)
        if isinstance(index, slice):
            blocks[index].copy_(back)
        else:
            blocks.index_copy_(0, index, back)
        if whole is not o:
            o.copy_(whole)


def _image(name: str, memories: Sequence[Tensor], images: Images, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return memory of the device for what `memories` hold, one behind the other, and whether it is beside them."""
    whole = merged(memories)
    if len(whole) == 1 and images.device.holds(whole[0]):
        return whole[0], False
    return images.take(name, sum(map(len, whole)), dtype), True


def _pairs(image: Tensor, memories: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(image.split([len(memory) for memory in memories]), memories, strict=True)


def _range(places: NDArray[np.int64]) -> slice | None:
    """Return places that follow one another, or None if they do not."""
    first = int(places[0]) if len(places) else 0
    return slice(first, first + len(places)) if np.array_equal(places, np.arange(first, first + len(places))) else None
