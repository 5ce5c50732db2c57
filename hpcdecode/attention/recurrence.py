"""The states of one recurrent layer in torch, and how they advance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hpcdecode.attention.layer_states import LayerStates
from hpcdecode.attention.state_calls import StateCall, TorchSteps
from hpcdecode.attention.states import EPSILON


class TorchLayerStates(LayerStates):
    """States that torch's operations advance: all tokens of one position at once, one position after another.

    Numbers are float32, in element-wise products and sums over a head, so that a sequence's states do not depend on
    what else is in a call as far as torch sums rows of one size alike.
    """

    def advance(self, call: StateCall, rows: Tensor, out: Tensor) -> None:
        """Advance sequences by their tokens, as `LayerStates.advance`."""
        call.by_steps(rows, out, self._advanced)

    def _advanced(self, steps: TorchSteps, rows: Tensor) -> Tensor:
        """Return the outputs, float32 [t, out_columns], of rows [t, row_columns], step after step."""
        shape = self.shape
        *inputs, decay, beta = rows.split(shape.widths, 1)
        u = torch.cat(inputs, 1).float()
        if shape.taps:
            u = self._convolved(steps.places, steps.sources.get(shape.taps), u)
        q, k, v = u.split(list(shape.widths[:3]), 1)
        if not shape.k_dim:
            alone: Tensor = v
            return alone
        factor = floats_in(beta) if shape.has_beta else None
        logs = floats_in(decay) if self._weights.rate is None else self._rates(factor)
        q, k = self._heads(q) * shape.scale, self._heads(k)
        v = v.unflatten(1, (shape.heads, -1))
        return self._recurred(steps.places, steps.sizes, q, k, v, logs, factor).flatten(1)

    def _convolved(self, places: Tensor, sources: Tensor | None, u: Tensor) -> Tensor:
        """Return the causal convolution of tokens u [t, channels], and keep the windows after them."""
        shape, weight, bias = self.shape, self._weights.convolution, self._weights.bias
        assert weight is not None, "a convolution has weights"
        tokens = len(u)
        if sources is None:  # of one tap
            read, taps = u, [u]
        else:
            read = torch.cat([self._windows.index_select(0, places).flatten(0, 1), u])
            taps = [read.index_select(0, own[:tokens]) for own in sources]
            ends = sources[:-1, tokens:].t().flatten()
            self._windows.index_copy_(0, places, read.index_select(0, ends).view(len(places), -1, shape.channels))
        result = taps[0] * weight[:, 0]
        for tap, own in zip(taps[1:], weight.t()[1:], strict=True):
            result = torch.addcmul(result, tap, own)
        result = result if bias is None else result + bias
        return functional.silu(result) if shape.silu else result

    def _heads(self, x: Tensor) -> Tensor:
        """Return q or k [t, k_heads * k_dim] by value head, [t, heads, k_dim], normalised if the shape says so."""
        shape = self.shape
        x = x.unflatten(1, (shape.k_heads, shape.k_dim))
        if shape.normalised:
            x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
        return x.repeat_interleave(shape.heads // shape.k_heads, 1)

    def _rates(self, beta: Tensor | None) -> Tensor:
        assert beta is not None and self._weights.rate is not None, "expected beta beside rates"
        return (self._weights.rate.view(self.shape.heads, -1) * beta[..., None]).flatten(1)

    def _recurred(
        self, places: Tensor, sizes: Sequence[int], q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor | None
    ) -> Tensor:
        """Return the outputs [t, heads, v_dim] of the recurrence, and keep the states after it."""
        shape, skip = self.shape, self._weights.skip
        states = self._states.index_select(0, places).float()
        decays = logs.view(len(q), shape.heads, shape.decay_dim, 1).exp()
        out, first = torch.empty_like(v), 0
        for size in sizes:
            own, state = slice(first, first + size), states[:size]
            state *= decays[own]
            keys = k[own, :, :, None]
            written = v[own] - (state * keys).sum(2) if shape.delta else v[own]
            written = written if beta is None else written * beta[own, :, None]
            state.addcmul_(keys, written[:, :, None])
            seen = self._rounded(state) if shape.state_dtype == "bfloat16" else state
            out[own] = (seen * q[own, :, :, None]).sum(2)
            first = own.stop
        self._states.index_copy_(0, places, states.to(self._states.dtype))
        return out if skip is None else torch.addcmul(out, v, skip[:, None])

    def _rounded(self, state: Tensor) -> Tensor:
        """Round states to bfloat16; return what is seen of them, rounded if heads have one value as in the kernels."""
        seen = state if self.shape.v_dim == 1 else state.clone()
        state.copy_(state.bfloat16())
        return seen


def floats_in(columns: Tensor) -> Tensor:
    """Return the float32 that columns of rows hold, two of two bytes each."""
    return columns.clone(memory_format=torch.contiguous_format).view(torch.float32)
