"""Tokens on a device that are not in recurrent states yet, as some may be dropped: guesses, and what came with them.

A call takes the tokens that were held and not dropped through the states, then those of its own that are known to be
right. The others go through the states, too, which are put back after that; their rows are held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.compressor import Compressor
from hpcdecode.attention.layer_states import LayerStates
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.state_calls import StateCall
from hpcdecode.attention.torch_reads import to_device


class HeldRows:
    """Rows of tokens that are not in a layer's states yet, those of a sequence in order.

    Args:
        shape: Shape of the layer.
        places: Number of sequences that it has room for.
        device: Of the rows.
    """

    def __init__(self, shape: RecurrentShape, places: int, device: torch.device) -> None:
        bits = torch.int16 if shape.element_bytes == 2 else torch.int32
        self._rows = torch.zeros(places, shape.lookahead, shape.row_columns, dtype=bits, device=device)

    def copy(self, source: int, target: int) -> None:
        """Copy what is at a place to another one."""
        self._rows[target] = self._rows[source]

    def take(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [n, row_columns] by place * lookahead + number, int64 [n]."""
        return self._rows.flatten(0, 1).index_select(0, index).view(dtype)

    def keep(self, index: Tensor, rows: Tensor) -> None:
        """Replace rows, by the same index."""
        self._rows.flatten(0, 1).index_copy_(0, index, rows.contiguous().view(self._rows.dtype))


class CallAhead:
    """How some sequences advance some of whose tokens may be dropped again.

    Args:
        places: Of the sequences, int64 [n].
        counts: Their new tokens, int32 [n].
        ahead: Those of them that may be dropped, the last ones, int32 [n].
        held: Tokens that are not in their states yet, int64 [n].
        lookahead: The most that are held.
        taps: Numbers of taps of the layers' convolutions.
        most: Sequences that torch's operations advance at once.
        device: Of the tensors.
    """

    def __init__(
        self,
        places: NDArray[np.int64],
        counts: NDArray[np.int32],
        ahead: NDArray[np.int32],
        held: NDArray[np.int64],
        lookahead: int,
        taps: Sequence[int],
        most: int,
        device: torch.device,
    ) -> None:
        def call(of: NDArray[np.int32], begins: NDArray[np.int64]) -> StateCall:
            return StateCall(places, of, begins, taps, most, device)

        begins, sure = np.cumsum(counts) - counts, counts - ahead
        self._held = call(held.astype(np.int32), np.cumsum(held) - held)
        self._sure, self._ahead = call(sure, begins), call(ahead, begins + sure)
        guessing = places[ahead > 0]
        sent = to_device(
            [
                _ranges(places * lookahead, held),
                _ranges(places * lookahead, ahead),
                _ranges(begins + sure, ahead),
                guessing,
            ],
            device,
        )
        self._held_at, self._kept_at, self._ahead_at, self._guessing = (x.long() for x in sent)

    def advance(self, layer: LayerStates | Compressor, rows_held: HeldRows, rows: Tensor, out: Tensor) -> None:
        """Advance the states of a layer, as `StateStore.run`.

        Args:
            layer: The states.
            rows_held: What is held of that layer.
            rows: Of the new tokens, [T, row_columns].
            out: Result, [T, out_columns]; overwritten.
        """
        if len(self._held_at):
            held = rows_held.take(self._held_at, rows.dtype)
            layer.advance(self._held, held, out.new_empty(len(held), out.shape[1]))
        layer.advance(self._sure, rows, out)
        if not len(self._guessing):
            return
        before = [x.index_select(0, self._guessing) for x in layer.tensors]
        layer.advance(self._ahead, rows, out)
        for x, own in zip(layer.tensors, before, strict=True):
            x.index_copy_(0, self._guessing, own)
        rows_held.keep(self._kept_at, rows.index_select(0, self._ahead_at))


def _ranges(begins: NDArray[np.int64], counts: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return counts[i] whole numbers from begins[i] on, one after the other."""
    sizes = counts.astype(np.int64)
    firsts = np.cumsum(sizes) - sizes
    found: NDArray[np.int64] = np.repeat(begins - firsts, sizes) + np.arange(int(sizes.sum()))
    return found
