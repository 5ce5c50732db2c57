"""Stores of recurrent state: what every one offers, and one in plain torch, which tests compare the fast one with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hpcdecode.attention.base import IntArray
from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.shapes import state_bytes

EPSILON = 1e-6  # beside the square of a norm


class StateStore(Protocol):
    """The states of many sequences, and the recurrences that advance them.

    Slots and counts are those of `KvCache`: a slot is open from its first `extend` to its `release`.
    """

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's states of all layers."""

    @property
    def open_slots(self) -> int:
        """Return the number of open slots."""

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of state that `run` has read and written so far."""

    @property
    def run_seconds(self) -> float:
        """Return the seconds spent in `run` so far."""

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Advance slots[i] by counts[i] tokens; a new slot opens with a state of zeros."""

    def run(self, layer: int, slots: IntArray, counts: IntArray, rows: Tensor, out: Tensor) -> None:
        """Advance the states of a layer by the last counts[i] tokens of slots[i], once for each `extend`.

        Args:
            layer: Index of the recurrent layer.
            slots: int32 [n].
            counts: int32 [n].
            rows: Rows [q | k | v | decay | beta] of the tokens, those of a slot in order, [T, row_columns].
            out: Result, [T, out_columns], of the dtype of rows; overwritten.
        """

    def release(self, slots: IntArray) -> None:
        """Forget sequences, and give their memory back."""

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with a copy of what src holds."""

    def truncate(self, slot: int, length: int) -> None:
        """Drop the last tokens of a slot, which came with one `extend` of 1 + `lookahead` at most, but not its first.

        Raises:
            ValueError: If one of them is in a state.
        """

    def length(self, slot: int) -> int:
        """Return the number of tokens that an open slot has seen."""

    def check(self) -> None:
        """Raise RuntimeError if what is counted is not what is held."""


class ReferenceStateStore:
    """A `StateStore` in torch, token by token.

    Args:
        layers: Shapes of the recurrent layers.
        weights: Their weights.
        max_sequences: Slots are 0 to max_sequences - 1.
        dtype: That states are computed in: float32, or float64 for exact answers. They are kept in it, too, or rounded
            to bfloat16 after every token if the shapes say so.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentShape],
        weights: Sequence[RecurrentWeights],
        max_sequences: int,
        dtype: torch.dtype = torch.float32,
    ):
        self.layers, self.max_sequences, self.dtype = tuple(layers), max_sequences, dtype
        self.weights = [RecurrentWeights(*(None if w is None else w.to(dtype) for w in own)) for own in weights]
        self.state_bytes = state_bytes(layers)
        self.bytes_moved = 0
        self.run_seconds = 0.0
        self._lengths: dict[int, int] = {}
        self._windows: dict[tuple[int, int], Tensor] = {}  # by layer and slot
        self._states: dict[tuple[int, int], Tensor] = {}
        # Windows and states as they were, one token earlier each
        self._before: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    @property
    def open_slots(self) -> int:
        """Return the number of open slots."""
        return len(self._lengths)

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Advance slots, as `StateStore.extend`."""
        for slot, count in _pairs(slots, counts):
            if not 0 <= slot < self.max_sequences:
                raise ValueError(f"slot {slot} is out of range: expected 0 to {self.max_sequences - 1}")
            if slot not in self._lengths:
                self._open(slot)
            self._lengths[slot] = self._lengths.get(slot, 0) + count

    def _open(self, slot: int) -> None:
        for i, shape in enumerate(self.layers):
            kept = shape.compress_rate * (1 + shape.overlaps), 2 * shape.channels  # values and gates
            window = kept if shape.compress_rate else (max(shape.taps - 1, 0), shape.channels)
            self._windows[i, slot] = torch.zeros(window, dtype=self.dtype)
            self._states[i, slot] = torch.zeros(shape.heads, shape.k_dim, shape.v_dim, dtype=self.dtype)
            self._before[i, slot] = []

    def run(self, layer: int, slots: IntArray, counts: IntArray, rows: Tensor, out: Tensor) -> None:
        """Advance the states of a layer, as `StateStore.run`."""
        begun = time.perf_counter()
        first = 0
        for slot, count in _pairs(slots, counts):
            begin = self.length(slot) - count - first
            for t in range(first, first + count):
                self._remember(layer, slot)
                of_token = self._compressed if self.layers[layer].compress_rate else self._token
                out[t] = of_token(layer, slot, rows[t].contiguous(), begin + t).to(out.dtype)
            first += count
            self.bytes_moved += 2 * self.layers[layer].state_bytes
        self.run_seconds += time.perf_counter() - begun

    def _remember(self, layer: int, slot: int) -> None:
        before, most = self._before[layer, slot], self.layers[layer].lookahead
        before.append((self._windows[layer, slot].clone(), self._states[layer, slot]))
        del before[: max(len(before) - most, 0)]

    def truncate(self, slot: int, length: int) -> None:
        """Drop tokens, as `StateStore.truncate`."""
        if not (dropped := self.length(slot) - length):
            return
        for i, shape in enumerate(self.layers):
            if not 0 < dropped <= min(shape.lookahead, len(self._before[i, slot])):
                raise ValueError(f"slot {slot}: cannot truncate length {self.length(slot)} to {length}")
            self._windows[i, slot], self._states[i, slot] = self._before[i, slot][-dropped]
            del self._before[i, slot][-dropped:]
        self._lengths[slot] = length

    def _compressed(self, layer: int, slot: int, row: Tensor, position: int) -> Tensor:
        """Return the mean that a compressor has as of a token."""
        shape, seen = self.layers[layer], self._windows[layer, slot]
        values, gates = row.split(shape.widths)[2:4]
        token = position % len(seen)
        seen[token] = torch.cat([values.to(self.dtype), self._floats(gates)])
        first = position // shape.compress_rate * shape.compress_rate
        parts = []
        for series, begin, end in ((0, first - shape.compress_rate, first), (-1, first, position + 1)):
            if series == 0 and not shape.overlaps:
                continue
            own = seen[[p % len(seen) for p in range(max(begin, 0), end)]].unflatten(1, (2, -1, shape.heads))
            parts.append(own[:, :, series])
        v, g = torch.cat(parts).unbind(1)
        mean: Tensor = (v * g.softmax(0)).sum(0)
        return mean

    def _token(self, layer: int, slot: int, row: Tensor, _: int) -> Tensor:
        shape, weights, key = self.layers[layer], self.weights[layer], (layer, slot)
        *x, decay, beta = row.split(shape.widths)
        u = torch.cat(x).to(self.dtype)
        if weights.convolution is not None:
            seen = torch.cat([self._windows[key], u[None]])
            self._windows[key] = seen[1:]
            u = (seen * weights.convolution.t()).sum(0)
            u = u if weights.bias is None else u + weights.bias
            u = functional.silu(u) if shape.silu else u
        q, k, v = u.split(list(shape.widths[:3]))
        if not shape.k_dim:
            alone: Tensor = v
            return alone
        factor = self._floats(beta) if shape.has_beta else None
        logs = self._floats(decay) if weights.rate is None else self._rates(shape, weights.rate, factor)
        return self._state_step(shape, weights, key, q, k, v.view(shape.heads, -1), logs, factor).flatten()

    def _floats(self, columns: Tensor) -> Tensor:
        """Return the float32 that columns of a row hold, two of two bytes each, in the dtype of states."""
        return columns.clone().view(torch.float32).to(self.dtype)

    def _rates(self, shape: RecurrentShape, rate: Tensor, beta: Tensor | None) -> Tensor:
        assert beta is not None, "expected beta beside rates"
        logs: Tensor = rate.view(shape.heads, -1) * beta[:, None]
        return logs

    def _state_step(
        self,
        shape: RecurrentShape,
        weights: RecurrentWeights,
        key: tuple[int, int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
    ) -> Tensor:
        q, k = (x.view(shape.k_heads, -1) for x in (q, k))
        if shape.normalised:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (q, k))
        q, k = (x.repeat_interleave(shape.heads // shape.k_heads, 0) for x in (q * shape.scale, k))
        state = self._states[key] * decay.view(shape.heads, -1, 1).exp()
        written = v - torch.einsum("hkv,hk->hv", state, k) if shape.delta else v
        written = written if beta is None else written * beta[:, None]
        state = state + k[:, :, None] * written[:, None]
        kept = state.bfloat16().to(self.dtype) if shape.state_dtype == "bfloat16" else state
        self._states[key] = kept
        seen = kept if shape.v_dim == 1 else state  # as in the kernels
        o = torch.einsum("hkv,hk->hv", seen, q)
        return o if weights.skip is None else o + weights.skip[:, None] * v

    def release(self, slots: IntArray) -> None:
        """Forget sequences, as `StateStore.release`."""
        for slot in map(int, slots):
            self.length(slot)
            del self._lengths[slot]
            for i in range(len(self.layers)):
                del self._windows[i, slot], self._states[i, slot], self._before[i, slot]

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst, as `StateStore.fork`."""
        if dst in self._lengths:
            raise ValueError(f"slot {dst} is open; release it before forking into it")
        self._lengths[dst] = self.length(src)
        for held in (self._windows, self._states):
            held.update({(i, dst): held[i, src].clone() for i in range(len(self.layers))})
        self._before.update({(i, dst): list(self._before[i, src]) for i in range(len(self.layers))})

    def length(self, slot: int) -> int:
        """Return the number of tokens that an open slot has seen."""
        if slot not in self._lengths:
            raise ValueError(f"slot {slot} is not open; extend it first")
        return self._lengths[slot]

    def check(self) -> None:
        """Raise RuntimeError if a state has no open slot, or a slot no state."""
        if {slot for _, slot in self._states} != (set(self._lengths) if self.layers else set()):
            raise RuntimeError("slots with states and open slots differ")


def _pairs(slots: IntArray, counts: IntArray) -> list[tuple[int, int]]:
    return [(int(s), int(c)) for s, c in zip(slots, counts, strict=True)]
