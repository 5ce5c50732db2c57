"""The store of recurrent states in torch on any device: all tokens of one position at once, one position after another.

Numbers are float32, in element-wise products and sums over a head, so that a sequence's states do not depend on what
else is in a call as far as torch sums rows of one size alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import IntArray
from hpcdecode.attention.clocks import clock_of
from hpcdecode.attention.compressor import Compressor
from hpcdecode.attention.recurrence import Recurrence
from hpcdecode.attention.shapes import RecurrentShape, RecurrentWeights, state_bytes
from hpcdecode.attention.state_slots import StateSlots
from hpcdecode.attention.torch_reads import to_device

_GROUP_BYTES = 1 << 28  # of the states of a layer that are advanced at once


class TorchStateStore:
    """A `StateStore` in torch. Tensors are on the device; calls put their work on its current stream and return.

    Args:
        layers: Shapes of the recurrent layers.
        weights: Their weights, on the host.
        max_sequences: Slots are 0 to max_sequences - 1.
        states: Slots that may be open at once. Their memory is taken now.
        device: Any device of torch.

    Attributes:
        state_bytes: Bytes of a sequence's states of all layers.

    Raises:
        torch.OutOfMemoryError: If the device has no room.
        ValueError: If an argument is bad.
    """

    @torch.inference_mode()
    def __init__(
        self,
        layers: Sequence[RecurrentShape],
        weights: Sequence[RecurrentWeights],
        max_sequences: int,
        states: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(weights) != len(layers) or not layers:
            raise ValueError(f"weights: expected those of {len(layers)} layers, at least one, got {len(weights)}")
        self.layers, self.device = tuple(layers), torch.device(device)
        self.state_bytes = state_bytes(layers)
        self._slots = StateSlots(len(layers), max_sequences, states)
        self._layers = [
            Compressor(shape, states, self.device)
            if shape.compress_rate
            else Recurrence(shape, own, states, self.device)
            for shape, own in zip(layers, weights, strict=True)
        ]
        self.length, self.check = self._slots.length, self._slots.check
        self.bytes_moved = 0
        self._clock = clock_of(self.device)
        largest = max(4 * shape.numbers for shape in layers)
        self._most = max(_GROUP_BYTES // max(largest, 1), 1)
        self._calls: dict[tuple[bytes, bytes], list[_Steps]] = {}
        self._version = 0

    @property
    def open_slots(self) -> int:
        """Return the number of open slots."""
        return self._slots.open_slots

    @property
    def run_seconds(self) -> float:
        """Return the seconds that the device took for `run`; wait for it."""
        return self._clock.seconds()

    @torch.inference_mode()
    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Advance slots, as `StateStore.extend`."""
        new = self._slots.extend(slots, counts)
        if not len(new):
            return
        (places,) = to_device([new], self.device)
        for layer in self._layers:
            layer.clear(places.long())

    @torch.inference_mode()
    def run(self, layer: int, slots: IntArray, counts: IntArray, rows: Tensor, out: Tensor) -> None:
        """Advance the states of a layer, as `StateStore.run`."""
        own, new = self._slots.due(layer, slots, counts)
        self._require(layer, int(new.sum()), rows, out)
        with self._clock:
            for steps in self._steps(own, new):
                o = self._layers[layer].advance(steps.places, steps.sizes, steps.sources, rows[steps.tokens])
                out.index_copy_(0, steps.tokens, o.to(out.dtype))
        self._slots.advance(layer, own, new)
        self.bytes_moved += 2 * self.layers[layer].state_bytes * len(own)

    def release(self, slots: IntArray) -> None:
        """Forget sequences, as `StateStore.release`."""
        self._slots.release(slots)

    @torch.inference_mode()
    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with a copy of what src holds, as `StateStore.fork`."""
        source, target = self._slots.fork(src, dst)
        for layer in self._layers:
            layer.copy(source, target)

    def _steps(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> list[_Steps]:
        """Return how these sequences advance, which stays on the device until slots open or close."""
        if self._version != self._slots.version:
            self._calls.clear()
            self._version = self._slots.version
        key = slots.tobytes(), counts.tobytes()
        if key not in self._calls:
            begins = np.cumsum(counts) - counts
            order = np.argsort(-counts, kind="stable")
            order = order[counts[order] > 0]
            places = self._slots.places(slots)
            groups = [order[i : i + self._most] for i in range(0, len(order), self._most)]
            self._calls[key] = [
                _Steps(places[own], counts[own], begins[own], self._layers, self.device) for own in groups
            ]
        return self._calls[key]

    def _require(self, layer: int, tokens: int, rows: Tensor, out: Tensor) -> None:
        shape = self.layers[layer]
        for name, x, columns in (("rows", rows, shape.row_columns), ("out", out, shape.out_columns)):
            if tuple(x.shape) != (tokens, columns):
                raise ValueError(f"{name}: expected shape [{tokens}, {columns}], got {list(x.shape)}")
            if x.element_size() != shape.element_bytes:
                raise ValueError(f"rows and out: expected {shape.element_bytes} bytes a column, got {x.dtype} {name}")
            if x.device.type != self.device.type:
                raise ValueError(f"{name}: expected a tensor on {self.device}, got one on {x.device}")


class _Steps:
    """How some sequences advance: the first tokens of all, then the second of those that have one, and so on.

    Args:
        places: Of the sequences, those of more tokens first, int64 [n].
        counts: Their tokens.
        begins: Row of the first of these in a call.
        layers: That they advance through.
        device: Of the tensors.

    Attributes:
        places: int64 [n].
        tokens: Rows of the call in the order in which they advance, int64 [t].
        sizes: Number of sequences at each step; a step's tokens are those of the first ones.
        sources: By number of taps of a convolution what it reads, see `Recurrence.advance`.
    """

    def __init__(
        self,
        places: NDArray[np.int64],
        counts: NDArray[np.int32],
        begins: NDArray[np.int64],
        layers: Sequence[Recurrence | Compressor],
        device: torch.device,
    ) -> None:
        self.sizes: list[int] = [int((counts > t).sum()) for t in range(int(counts.max(initial=0)))]
        tokens = np.concatenate([begins[:n] + t for t, n in enumerate(self.sizes)])
        taps = sorted({layer.shape.taps for layer in layers if layer.shape.taps > 1})
        read = [_sources(counts, self.sizes, each) for each in taps]
        sent = [x.long() for x in to_device([places, tokens, *(r.ravel() for r in read)], device)]
        self.places, self.tokens, *windows = sent
        self.sources = {each: window.view(r.shape) for each, window, r in zip(taps, windows, read, strict=True)}


def _sources(counts: NDArray[np.int32], sizes: Sequence[int], taps: int) -> NDArray[np.int64]:
    """Return what each token's taps read, and then what each sequence's next window is, int64 [taps, t + n].

    Rows 0 to n * (taps - 1) - 1 are the windows, those of a sequence in order; then come the tokens as they advance.
    The last row of the part for windows means nothing.
    """
    n, keep = len(counts), taps - 1
    firsts = np.cumsum([0, *sizes])
    rows = np.full((n, keep + int(counts.max(initial=0))), -1)  # row of every position, from the window's first one
    rows[:, :keep] = np.arange(n * keep).reshape(n, keep)
    for t, size in enumerate(sizes):
        rows[:size, keep + t] = n * keep + firsts[t] + np.arange(size)
    of_tokens = [rows[:size, t : t + taps] for t, size in enumerate(sizes)]
    ends = counts[:, None] + np.arange(taps)
    of_windows = np.take_along_axis(rows, np.minimum(ends, rows.shape[1] - 1), 1)
    return np.ascontiguousarray(np.concatenate([*of_tokens, of_windows]).T)
