"""The store of recurrent states on a GPU: kernels advance them, or torch's operations where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import IntArray
from hpcdecode.attention.clocks import clock_of
from hpcdecode.attention.compressor import Compressor
from hpcdecode.attention.cuda import serves_states
from hpcdecode.attention.cuda_states import CudaLayerStates
from hpcdecode.attention.recurrence import TorchLayerStates
from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.shapes import state_bytes
from hpcdecode.attention.state_calls import StateCall
from hpcdecode.attention.state_slots import StateSlots
from hpcdecode.attention.states_ahead import CallAhead, HeldRows
from hpcdecode.attention.torch_reads import to_device

_CALLS = 64  # that stay on the device
_GROUP_BYTES = 1 << 28  # of the states of a layer that torch's operations advance at once


class DeviceStateStore:
    """A `StateStore` on any device of torch.

    Tensors are on the device; calls put their work on its current stream and return.

    Args:
        layers: Shapes of the recurrent layers.
        weights: Their weights, on the host.
        max_sequences: Slots are 0 to max_sequences - 1.
        states: Slots that may be open at once. Their memory is taken now.
        device: Any device of torch. On the CPU kernels are emulated.
        by_kernels: False to leave all layers to torch's operations.

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
        *,
        by_kernels: bool = True,
    ) -> None:
        if len(weights) != len(layers) or not layers:
            raise ValueError(f"weights: expected those of {len(layers)} layers, at least one, got {len(weights)}")
        self.layers, self.device = tuple(layers), torch.device(device)
        self.state_bytes = state_bytes(layers)
        self._lookahead = layers[0].lookahead
        self._slots = StateSlots(len(layers), max_sequences, states, self._lookahead)
        self._layers = [
            _layer(shape, own, states, self.device, by_kernels) for shape, own in zip(layers, weights, strict=True)
        ]
        self._held = [HeldRows(shape, states, self.device) for shape in layers] if self._lookahead else []
        self.length, self.check, self.truncate = self._slots.length, self._slots.check, self._slots.truncate
        self.bytes_moved = 0
        self._clock = clock_of(self.device)
        largest = max(4 * shape.numbers for shape in layers)
        self._most = max(_GROUP_BYTES // max(largest, 1), 1)
        self._calls: dict[tuple[bytes, ...], StateCall | CallAhead] = {}
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
        call = self._call(layer, own, new)
        with self._clock:
            if isinstance(call, CallAhead):
                call.advance(self._layers[layer], self._held[layer], rows, out)
            else:
                self._layers[layer].advance(call, rows, out)
        self._slots.advance(layer, own, new)
        self.bytes_moved += 2 * self.layers[layer].state_bytes * len(own)

    def release(self, slots: IntArray) -> None:
        """Forget sequences, as `StateStore.release`."""
        self._slots.release(slots)

    @torch.inference_mode()
    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with a copy of what src holds, as `StateStore.fork`."""
        source, target = self._slots.fork(src, dst)
        for layer in (*self._layers, *self._held):
            layer.copy(source, target)

    def _call(self, layer: int, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> StateCall | CallAhead:
        """Return how these sequences advance, which stays on the device until slots open or close."""
        if self._version != self._slots.version or len(self._calls) > _CALLS:
            self._calls.clear()
            self._version = self._slots.version
        held, ahead = self._slots.held(layer, slots), self._slots.droppable(counts)
        key = slots.tobytes(), counts.tobytes(), held.tobytes()
        if key not in self._calls:
            places, about = self._slots.places(slots), ([shape.taps for shape in self.layers], self._most, self.device)
            if held.any() or ahead.any():
                self._calls[key] = CallAhead(places, counts, ahead, held, self._lookahead, *about)
            else:
                self._calls[key] = StateCall(places, counts, np.cumsum(counts) - counts, *about)
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


def _layer(
    shape: RecurrentShape, weights: RecurrentWeights, places: int, device: torch.device, by_kernels: bool
) -> Compressor | CudaLayerStates | TorchLayerStates:
    if shape.compress_rate:
        return Compressor(shape, places, device)
    kind = CudaLayerStates if by_kernels and serves_states(shape, device) else TorchLayerStates
    return kind(shape, weights, places, device)
