"""The shape of a layer that keeps a state of fixed size a sequence, and the weights that its R-rank needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT = 4  # bytes
STATE_DTYPES = ("float32", "bfloat16")


class RecurrentShape(msgspec.Struct, frozen=True, tag="recurrent"):
    """The shape of a causal convolution, of a linear recurrence, of one after the other, or of a compressor.

    A head's state S has k_dim rows of v_dim numbers. A token's row is `[q | k | v | decay | beta]`. In rows of two-byte
    elements decay and beta, which are float32, take two columns each.

    A compressor (DeepSeek-V4, section 2.3) gives each channel the mean of the values of a window of compress_rate
    tokens, weighted by the softmax of their gates. A head is a channel, k_dim is 0, a row is `[values | gates]`, and
    what a token gives is the mean up to its own: that of the last token of a window is an entry. Its state is float32.

    Attributes:
        heads: Number of value heads.
        k_heads: Number of heads of q and k; each serves heads / k_heads value heads.
        k_dim: Elements of a head of q and k; 0 if there is no state but the convolution's.
        v_dim: Elements of a value head.
        taps: Taps of the convolution of all columns of q, k and v; 0 for none.
        silu: True if SiLU is applied to the convolution's result.
        delta: True if what the state says of k is taken from v (the delta rule).
        normalised: True if q and k are divided by their norms, head by head.
        scale: Factor of q.
        decay_dim: Decays of a head: 1, or k_dim.
        has_beta: True if rows have a factor of what is written, for each head.
        has_rate: True if log decays are beta times a weight, and not in the rows.
        element_bytes: Bytes of a column.
        state_dtype: Data type that states are kept as, one of STATE_DTYPES. All arithmetic is in float32.
        compress_rate: Tokens of a window of a compressor; 0 for none.
        overlaps: True if each mean is over the window before, too: rows then have two values and gates a channel, first
            those that the next window's mean takes, behind them those of its own.
        lookahead: Tokens by which sequences may be truncated, after calls of one more at most: rows of so many are
            kept beside the state.
    """

    heads: int
    k_heads: int
    k_dim: int
    v_dim: int
    taps: int = 0
    silu: bool = False
    delta: bool = False
    normalised: bool = False
    scale: float = 1.0
    decay_dim: int = 1
    has_beta: bool = False
    has_rate: bool = False
    element_bytes: int = _FLOAT
    state_dtype: str = "float32"
    compress_rate: int = 0
    overlaps: bool = False
    lookahead: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the columns of q, k, v, decay and beta, 0 for those that rows do not have."""
        floats = _FLOAT // self.element_bytes
        if self.compress_rate:
            values = self.heads * (1 + self.overlaps)
            return 0, 0, values, values * floats, 0
        decay = 0 if self.has_rate or not self.k_dim else self.heads * self.decay_dim
        q, beta = self.k_heads * self.k_dim, self.heads if self.has_beta else 0
        return q, q, self.heads * self.v_dim, decay * floats, beta * floats

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: the columns of q, k and v."""
        return sum(self.widths[:3])

    @property
    def row_columns(self) -> int:
        """Return the columns of a row."""
        return sum(self.widths)

    @property
    def out_columns(self) -> int:
        """Return the columns of an output row."""
        return self.heads * self.v_dim

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a sequence's state takes, with what the convolution reads and rows that are kept."""
        rows = self.lookahead * self.row_columns * self.element_bytes
        return _FLOAT * max(self.taps - 1, 0) * self.channels + self.number_bytes * self.numbers + rows

    @property
    def numbers(self) -> int:
        """Return the numbers of a sequence's state, without that of the convolution."""
        if self.compress_rate:
            return self.heads * 3 * (3 if self.overlaps else 1)  # largest gate, sum and weighted sum of each mean
        return self.heads * self.k_dim * self.v_dim

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a number of a state."""
        return 2 if self.state_dtype == "bfloat16" and not self.compress_rate else _FLOAT


class RecurrentWeights(NamedTuple):
    """The weights of a recurrent layer that its R-rank needs, float32 on the host.

    Attributes:
        convolution: Weights of the taps, [channels, taps], the newest token's last; or None.
        bias: Of the convolution, [channels], or None.
        rate: Log decay per unit of beta, [heads * decay_dim], or None.
        skip: Factor of v in the output, [heads], or None.
    """

    convolution: Tensor | None = None
    bias: Tensor | None = None
    rate: Tensor | None = None
    skip: Tensor | None = None


def example_weights(shape: RecurrentShape) -> RecurrentWeights:
    """Return weights of zeros for a recurrent layer of `shape`, to measure its speed."""
    import torch

    convolution = torch.zeros(shape.channels, shape.taps) if shape.taps else None
    return RecurrentWeights(convolution, rate=torch.zeros(shape.heads * shape.decay_dim) if shape.has_rate else None)
