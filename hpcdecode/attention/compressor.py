"""The means of one compressor's windows in torch, and how they advance (see `RecurrentShape`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.recurrence import floats_in
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.state_calls import StateCall, TorchSteps

_NO_GATE = -1e30  # of a mean of nothing
_OWN, _NEXT, _BEFORE = range(3)  # means: of this window for itself and for the next, and of the one before for this


class Compressor:
    """The means of a layer, by place, as `LayerStates` keeps states.

    A mean has the largest gate, the sum of exp(gate - largest), and that sum of values, of every channel.

    Args:
        shape: Shape of the layer.
        states: Number of places.
        device: Of the means.

    Attributes:
        shape: Shape of the layer.
    """

    def __init__(self, shape: RecurrentShape, states: int, device: torch.device) -> None:
        self.shape = shape
        self._states = torch.zeros(states, 3 if shape.overlaps else 1, 3, shape.heads, device=device)
        self._seen = torch.zeros(states, dtype=torch.int64, device=device)  # tokens

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that it keeps, by place."""
        return self._states, self._seen

    def clear(self, places: Tensor) -> None:
        """Let sequences begin; places: int64 [n]."""
        self._states.index_fill_(0, places, 0.0)
        self._states[places, :, 0] = _NO_GATE
        self._seen.index_fill_(0, places, 0)

    def copy(self, source: int, target: int) -> None:
        """Copy what is at a place to another one."""
        self._states[target], self._seen[target] = self._states[source], self._seen[source]

    def advance(self, call: StateCall, rows: Tensor, out: Tensor) -> None:
        """Advance sequences by their tokens, whose rows are [values | gates], as `StateStore.run`."""
        call.by_steps(rows, out, self._advanced)

    def _advanced(self, steps: TorchSteps, rows: Tensor) -> Tensor:
        """Return the means as of each token, float32 [t, out_columns], of rows [t, row_columns], step after step."""
        shape = self.shape
        parts = rows.split(shape.widths, 1)
        values, gates = (x.unflatten(1, (-1, shape.heads)) for x in (parts[2].float(), floats_in(parts[3])))
        places = steps.places
        means, seen = self._states.index_select(0, places), self._seen.index_select(0, places)
        out, first = torch.empty(len(rows), shape.heads, device=rows.device), 0
        for size in steps.sizes:
            own, now = slice(first, first + size), means[:size]
            self._begin(now, seen[:size] % shape.compress_rate == 0)
            for series in range(values.shape[1]):
                _add(now[:, _OWN if series + 1 == values.shape[1] else _NEXT], gates[own, series], values[own, series])
            _, sums, totals = _together(now[:, _OWN], now[:, _BEFORE]) if shape.overlaps else now[:, _OWN].unbind(1)
            out[own] = totals / sums
            seen[:size] += 1
            first = own.stop
        self._states.index_copy_(0, places, means)
        self._seen.index_copy_(0, places, seen)
        return out

    def _begin(self, means: Tensor, begins: Tensor) -> None:
        """Begin the window of those sequences for which `begins` [n] is true."""
        if self.shape.overlaps:
            means[:, _BEFORE] = torch.where(begins[:, None, None], means[:, _NEXT], means[:, _BEFORE])
        open_means = means[:, :_BEFORE]
        open_means.masked_fill_(begins[:, None, None, None], 0.0)
        open_means[:, :, 0].masked_fill_(begins[:, None, None], _NO_GATE)


def _add(mean: Tensor, gates: Tensor, values: Tensor) -> None:
    """Add a token to means [n, 3, channels]."""
    added = torch.stack([gates, torch.ones_like(gates), values], 1)
    mean.copy_(torch.stack(_together(mean, added), 1))


def _together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean over what two means [n, 3, channels] are over: largest gate, sum and weighted sum."""
    top = torch.maximum(a[:, 0], b[:, 0])
    of_a, of_b = (a[:, 0] - top).exp(), (b[:, 0] - top).exp()
    return top, a[:, 1] * of_a + b[:, 1] * of_b, a[:, 2] * of_a + b[:, 2] * of_b
