"""The states of one recurrent layer on a GPU, advanced by kernels of `native/attn_cuda`."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.base import native_states
from hpcdecode.attention.cuda import native, stream_of
from hpcdecode.attention.layer_states import LayerStates
from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.state_calls import StateCall


class CudaLayerStates(LayerStates):
    """States that are read and written once a call, whatever its tokens; arguments as for `LayerStates`.

    On the CPU the kernels are emulated.
    """

    def __init__(self, shape: RecurrentShape, weights: RecurrentWeights, places: int, device: torch.device) -> None:
        lanes = shape.v_dim == 1
        super().__init__(shape, weights, places, device, by_row=lanes)
        self._device, module = device, native(device)
        convolution, bias, rate, skip = self._weights
        if lanes and rate is not None:
            rate = rate.view(shape.heads, -1).t().contiguous()
        convolution = None if convolution is None else convolution.t().contiguous()
        self._held = convolution, bias, rate, skip  # what the native layer has addresses of
        (own,) = native_states([shape], module.RecurrentShape)
        self._native = module.Recurrence(
            own,
            shape.state_dtype,
            _address(convolution),
            _address(bias),
            _address(rate),
            _address(skip),
            _address(self._windows),
            _address(self._states),
            device.index or 0,
        )

    def advance(self, call: StateCall, rows: Tensor, out: Tensor) -> None:
        """Advance sequences by their tokens, as `LayerStates.advance`."""
        shape, inputs = self.shape, None
        if shape.taps and shape.k_dim:
            inputs = torch.empty(len(rows), shape.channels, device=self._device)
        self._native.advance(
            call.sequences.data_ptr(),
            call.count,
            call.longest,
            rows,
            out,
            _address(inputs),
            stream_of(self._device),
        )


def _address(x: Tensor | None) -> int:
    return 0 if x is None or not x.numel() else x.data_ptr()
