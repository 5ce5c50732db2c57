"""The weights of layers that keep a state, as S-ranks send them to R-ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.exchange.partition import Partition


class FloatData(msgspec.Struct, frozen=True, array_like=True):
    """A float32 tensor."""

    shape: list[int]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> FloatData:
        """Return the data of a float32 tensor of the host."""
        return cls(list(tensor.shape), tensor.contiguous().numpy().tobytes())

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return torch.frombuffer(bytearray(self.data), dtype=torch.float32).view(self.shape)


class StateWeights(msgspec.Struct, frozen=True):
    """`RecurrentWeights` as a message."""

    convolution: FloatData | None
    bias: FloatData | None
    rate: FloatData | None
    skip: FloatData | None

    @classmethod
    def of(cls, weights: RecurrentWeights) -> StateWeights:
        """Return the message for `weights`."""
        return cls(*(None if w is None else FloatData.of(w) for w in weights))

    def part(self, whole: RecurrentShape, partition: Partition, rank: int) -> RecurrentWeights:
        """Return what R-rank `rank` needs of a layer of shape `whole`."""
        convolution, bias, rate, skip = (None if w is None else w.tensor() for w in msgspec.structs.astuple(self))
        if not partition.by_head:
            return RecurrentWeights(convolution, bias, rate, skip)
        columns, heads = partition.columns(whole, rank), partition.heads(whole, rank)
        channels = _channels(whole, columns.rows)
        return RecurrentWeights(
            None if convolution is None else convolution[channels],
            None if bias is None else bias[channels],
            None if rate is None else rate.view(whole.heads, -1)[heads].flatten(),
            None if skip is None else skip[heads],
        )


def _channels(whole: RecurrentShape, rows: Sequence[slice]) -> Tensor:
    """Return the channels of the convolution that an R-rank has; rows: its columns of each part of a row."""
    first, found = 0, []
    parts = iter(rows)
    for width in whole.widths[:3]:
        if width:
            own = next(parts)
            found.append(torch.arange(first + own.start, first + own.stop))
        first += width
    return torch.cat(found)
