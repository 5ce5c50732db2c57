"""The states of one recurrent layer on a device, by place, and its weights there."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.state_calls import StateCall


class LayerStates:
    """What a layer keeps of sequences. Subclasses advance it by a call's tokens.

    Args:
        shape: Shape of the layer.
        weights: Its weights, on the host.
        places: Number of sequences that it has room for.
        device: Of the states.
        by_row: Whether the heads' numbers of a row of the state lie side by side, and not those of a head.

    Attributes:
        shape: Shape of the layer.

    Raises:
        ValueError: If a weight has another shape.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        weights: RecurrentWeights,
        places: int,
        device: torch.device,
        *,
        by_row: bool = False,
    ) -> None:
        self.shape = shape
        _require(shape, weights)
        self._weights = RecurrentWeights(*(None if w is None else w.to(device, torch.float32) for w in weights))
        kept = torch.bfloat16 if shape.state_dtype == "bfloat16" else torch.float32
        size = (shape.k_dim, shape.heads, shape.v_dim) if by_row else (shape.heads, shape.k_dim, shape.v_dim)
        self._windows = torch.zeros(places, max(shape.taps - 1, 0), shape.channels, device=device)
        self._states = torch.zeros(places, *size, dtype=kept, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that it keeps, by place."""
        return self._windows, self._states

    def advance(self, call: StateCall, rows: Tensor, out: Tensor) -> None:
        """Advance sequences by their tokens, as `StateStore.run`.

        Args:
            call: The sequences.
            rows: [q | k | v | decay | beta] of the tokens, [T, row_columns].
            out: Result, [T, out_columns]; overwritten.
        """
        raise NotImplementedError

    def clear(self, places: Tensor) -> None:
        """Let sequences begin; places: int64 [n]."""
        self._windows.index_fill_(0, places, 0.0)
        self._states.index_fill_(0, places, 0.0)

    def copy(self, source: int, target: int) -> None:
        """Copy what is at a place to another one."""
        self._windows[target] = self._windows[source]
        self._states[target] = self._states[source]


def _require(shape: RecurrentShape, weights: RecurrentWeights) -> None:
    sizes = {
        "convolution": (shape.channels, shape.taps),
        "bias": (shape.channels,),
        "rate": (shape.heads * shape.decay_dim,),
        "skip": (shape.heads,),
    }
    for name, size in sizes.items():
        weight = getattr(weights, name)
        if weight is not None and tuple(weight.shape) != size:
            raise ValueError(f"{name}: expected shape {list(size)}, got {list(weight.shape)}")
    if (weights.convolution is not None) != (shape.taps > 0) or (weights.rate is not None) != shape.has_rate:
        raise ValueError("expected weights of a convolution and rates if the shape has them, and only then")
