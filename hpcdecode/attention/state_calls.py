"""The sequences of one call of a store of states on a device, and what layers need of them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.torch_reads import to_device


class StateCall:
    """How some sequences advance. What is made of it goes to the device once.

    Args:
        places: Of the sequences, int64 [n].
        counts: Their tokens, int32 [n].
        begins: Row of the first of these in the call, [n].
        taps: Numbers of taps of the layers' convolutions.
        most: Sequences that torch's operations advance at once.
        device: Of the tensors.

    Attributes:
        count: Number of sequences that have tokens.
        longest: Most tokens of one.
    """

    def __init__(
        self,
        places: NDArray[np.int64],
        counts: NDArray[np.int32],
        begins: NDArray[np.int64],
        taps: Sequence[int],
        most: int,
        device: torch.device,
    ) -> None:
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        self._places, self._counts, self._begins = places[order], counts[order], begins[order]
        self._taps, self._most, self._device = sorted({each for each in taps if each > 1}), most, device
        self.count, self.longest = len(order), int(counts.max(initial=0))

    @cached_property
    def sequences(self) -> Tensor:
        """Return places, tokens and first rows of the sequences, int32 [3, n]."""
        sent = to_device([np.concatenate([self._places, self._counts, self._begins])], self._device)
        return sent[0].view(3, self.count)

    @cached_property
    def steps(self) -> list[TorchSteps]:
        """Return what torch's operations take one after the other: at most so many sequences each."""
        groups = [slice(i, i + self._most) for i in range(0, self.count, self._most)]
        return [
            TorchSteps(self._places[own], self._counts[own], self._begins[own], self._taps, self._device)
            for own in groups
        ]

    def by_steps(self, rows: Tensor, out: Tensor, advance: Callable[[TorchSteps, Tensor], Tensor]) -> None:
        """Let torch's operations take tokens through a layer.

        Args:
            rows: Of the tokens, [T, columns].
            out: Result, [T, columns]; overwritten.
            advance: Takes steps and the rows [t, columns] of their tokens, one step after the other; returns their
                outputs.
        """
        for steps in self.steps:
            out.index_copy_(0, steps.tokens, advance(steps, rows[steps.tokens]).to(out.dtype))


class TorchSteps:
    """How some sequences advance: the first tokens of all, then the second of those that have one, and so on.

    Args:
        places: Of the sequences, those of more tokens first, int64 [n].
        counts: Their tokens.
        begins: Row of the first of these in a call.
        taps: Numbers of taps, 2 or more, of convolutions that they advance through.
        device: Of the tensors.

    Attributes:
        places: int64 [n].
        tokens: Rows of the call in the order in which they advance, int64 [t].
        sizes: Number of sequences at each step; a step's tokens are those of the first ones.
        sources: By number of taps, what the convolution of each token and the windows after it read, int64
            [taps, t + n]: of the windows before, [n * (taps - 1)], and behind these the tokens.
    """

    def __init__(
        self,
        places: NDArray[np.int64],
        counts: NDArray[np.int32],
        begins: NDArray[np.int64],
        taps: Sequence[int],
        device: torch.device,
    ) -> None:
        self.sizes: list[int] = [int((counts > t).sum()) for t in range(int(counts.max(initial=0)))]
        tokens = np.concatenate([begins[:n] + t for t, n in enumerate(self.sizes)])
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
