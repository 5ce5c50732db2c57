"""The KV cache on a GPU: the host keeps the block table, K and V lie on the device, where kernels attend to them.

A device is a CUDA device, or the CPU: there the same kernels run as loops of a host compiler, for the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from hpcdecode.attention.base import (
    DEFAULT_BLOCK_TOKENS,
    FloatArray,
    IntArray,
    KvCapacityError,
    Matrix,
    native_shapes,
    native_states,
)
from hpcdecode.attention.clocks import clock_of
from hpcdecode.attention.native import NativeKvCache
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, adds_to_scores, chooses_tokens
from hpcdecode.errors import UserError
from hpcdecode.system.gpus import use_gpu

if TYPE_CHECKING:
    from hpcdecode import _attn_cuda

KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "k8v4", "int4")
HOW_TO_BUILD = "install it with pip install . -Ccmake.define.HPCDECODE_CUDA=ON where nvcc is"


class CudaModule(Protocol):
    """The native module of a device: `_attn_cuda`, or `_attn_cuda_emulated`, which has the same interface."""

    @property
    def KvCache(self) -> type[_attn_cuda.KvCache]:
        """Return the class of native KV caches."""

    @property
    def LayerShape(self) -> type[_attn_cuda.LayerShape]:
        """Return the class of native shapes."""

    @property
    def RecurrentShape(self) -> type[_attn_cuda.RecurrentShape]:
        """Return the class of native shapes of recurrent layers."""

    @property
    def Recurrence(self) -> type[_attn_cuda.Recurrence]:
        """Return the class of recurrent layers."""

    @property
    def CapacityError(self) -> type[_attn_cuda.CapacityError]:
        """Return the error of a full KV cache."""

    def block_bytes(self, layers: Sequence[_attn_cuda.LayerShape], kv_dtype: str, block_tokens: int) -> int:
        """Return the bytes of a block over all layers."""

    def layer_groups(
        self, layers: Sequence[_attn_cuda.LayerShape], kv_dtype: str, block_tokens: int
    ) -> tuple[int, list[tuple[int, bool]]]:
        """Return the bytes of a block and the windows of groups of layers."""

    def serves(self, layers: Sequence[_attn_cuda.LayerShape], kv_dtype: str, device: int) -> bool:
        """Return whether there are kernels for these layers, and room for them in a device's shared memory."""

    def serves_states(self, shape: _attn_cuda.RecurrentShape) -> bool:
        """Return whether there are kernels for a recurrent layer."""

    def expand_weights(
        self,
        form: int,
        packed: int,
        out: int,
        dtype: str,
        experts: int,
        outputs: int,
        inputs: int,
        device: int,
        stream: int,
    ) -> None:
        """Expand weights in few bits to matrices [experts, outputs, inputs]."""

    def device_count(self) -> int:
        """Return the number of devices that the driver shows."""


def built() -> bool:
    """Return True if this hpcdecode was built with CUDA."""
    try:
        import_module("hpcdecode._attn_cuda")
    except ImportError:
        return False
    return True


def state() -> str:
    """Return what `doctor` says of attention on GPUs."""
    if not built():
        return "built without CUDA"
    count, trouble = _devices()
    return f"built with CUDA, {trouble or f'{count} devices'}"


def _devices() -> tuple[int, str]:
    """Return how many GPUs the driver shows to the kernels, and why it shows none if it cannot."""
    from hpcdecode import _attn_cuda

    try:
        return _attn_cuda.device_count(), ""
    except RuntimeError as error:  # such as of a toolkit that is newer than the driver
        return 0, str(error)


def native(device: torch.device) -> CudaModule:
    """Return the module that has the kernels for `device`.

    Raises:
        UserError: If it was not built.
    """
    if device.type == "cpu":
        from hpcdecode import _attn_cuda_emulated

        return _attn_cuda_emulated
    if not built():
        raise UserError(
            f"attention on a GPU: expected an hpcdecode that was built with CUDA, got one without; {HOW_TO_BUILD}",
            everywhere=True,
        )
    if trouble := _devices()[1]:
        raise UserError(
            f"attention on a GPU: expected a driver that runs what hpcdecode was built with, got {trouble}; update the "
            "driver, or build with a CUDA toolkit that it knows",
            everywhere=True,
        )
    from hpcdecode import _attn_cuda

    return _attn_cuda


def stream_of(device: torch.device) -> int:
    """Return the address of a device's current stream; 0 for the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def serves(layers: Sequence[LayerShape], kv_dtype: str, device: torch.device) -> bool:
    """Return whether there are kernels for these layers, and room for them in the shared memory of `device`.

    Latents are left to torch's operations, too, if this hpcdecode was built without CUDA.
    """
    latent = any(shape.latent for shape in layers)
    if chooses_tokens(layers) or adds_to_scores(layers) or (latent and device.type != "cpu" and not built()):
        return False
    module = native(device)
    return not layers or module.serves(native_shapes(layers, module.LayerShape), kv_dtype, device.index or 0)


def serves_states(shape: RecurrentShape, device: torch.device | str = "cpu") -> bool:
    """Return whether there are kernels for a recurrent layer; none if this hpcdecode was built without CUDA."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not built()):
        return False
    module = native(device)
    return module.serves_states(native_states([shape], module.RecurrentShape)[0])


def block_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int, device: torch.device) -> int:
    """Return the bytes of a block over all layers."""
    module = native(device)
    return module.block_bytes(native_shapes(layers, module.LayerShape), kv_dtype, block_tokens)


def layer_groups(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int) -> tuple[int, list[tuple[int, bool]]]:
    """Return the bytes of a block and the windows (tokens, or 0; chunked) of the groups of layers that share them."""
    module = native(torch.device("cpu"))  # layouts are those of any device
    return module.layer_groups(native_shapes(layers, module.LayerShape), kv_dtype, block_tokens)


def copy_rate(device: torch.device, nbytes: int = 256 << 20) -> float:
    """Return the bytes per second, read and written, of copying on a device."""
    half = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    seconds: list[float] = []
    for _ in range(6):
        begun = perf_counter()
        other.copy_(half)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - begun)
    return nbytes / min(seconds)


class CudaKvCache(NativeKvCache["_attn_cuda.KvCache"]):
    """A `KvCache` on a GPU. Tensors are on the device; calls put their work on its current stream and return.

    Args:
        layers: Shapes of the attention layers.
        kv_dtype: One of KV_DTYPES.
        capacity_tokens: Tokens to hold, rounded up to whole blocks.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block, or None for the default.
        device: A CUDA device, or the CPU for the emulation.
        range_blocks: Blocks of a page of a cache that has room for some pages (see `streamed_cuda.py`), or 0.
        frames: Number of pages of any layer that it has room for.
        windowed: Whether sequences give up what leaves windows, as `CpuKvCache` says.
        lookahead: Tokens by which a slot may be truncated all the same, as there.

    Raises:
        torch.OutOfMemoryError: If the device has no room.
        ValueError: If heads or kv_dtype have no kernels.
        UserError: If this hpcdecode was built without CUDA.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int | None = None,
        device: torch.device | str = "cuda",
        range_blocks: int = 0,
        frames: int = 0,
        windowed: bool = False,
        lookahead: int = 0,
    ) -> None:
        self.device = device = torch.device(device)
        module = native(device)
        if device.type == "cuda":
            self.device = device = torch.device("cuda", device.index or 0)
            use_gpu(device)
        try:
            cache = module.KvCache(
                native_shapes(layers, module.LayerShape),
                kv_dtype,
                capacity_tokens,
                max_sequences,
                DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens,
                device.index or 0,
                range_blocks=range_blocks,
                frames=frames,
                windowed=windowed,
                lookahead=lookahead,
            )
        except MemoryError as error:
            raise torch.OutOfMemoryError(
                f"{device} has no room for {capacity_tokens:,} tokens of KV cache: {error}"
            ) from None
        super().__init__(cache, layers, kv_dtype)
        self._capacity_error = module.CapacityError
        self._clock = clock_of(device)

    @property
    def attend_seconds(self) -> float:
        """Return the seconds that the device took for `attend`; wait for it."""
        return self._clock.seconds()

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        try:
            self.native.extend(slots, counts, stream_of(self.device))
        except self._capacity_error as error:
            raise KvCapacityError(str(error)) from None

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`."""
        self.native.append(layer, slots, counts, kv, stream_of(self.device))

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Append and attend, as `KvCache.attend`."""
        with self._clock:
            self.native.attend(layer, slots, counts, qkv, out, sinks, stream_of(self.device))
