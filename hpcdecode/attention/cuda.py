"""The KV cache on a GPU: the host keeps the block table, K and V lie on the device, where kernels attend to them.

A device is a CUDA device, or the CPU: there the same kernels run as loops of a host compiler, for the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from hpcdecode.attention.base import DEFAULT_BLOCK_TOKENS, FloatArray, IntArray, KvCapacityError, Matrix, native_shapes
from hpcdecode.attention.native import NativeKvCache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from hpcdecode import _attn_cuda

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")


class CudaModule(Protocol):
    """The native module of a device: `_attn_cuda`, or `_attn_cuda_emulated`, which has the same interface."""

    @property
    def KvCache(self) -> type[_attn_cuda.KvCache]:
        """Return the class of native KV caches."""

    @property
    def LayerShape(self) -> type[_attn_cuda.LayerShape]:
        """Return the class of native shapes."""

    @property
    def CapacityError(self) -> type[_attn_cuda.CapacityError]:
        """Return the error of a full KV cache."""

    def block_bytes(self, layers: Sequence[_attn_cuda.LayerShape], kv_dtype: str, block_tokens: int) -> int:
        """Return the bytes of a block over all layers."""

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
    return f"built with CUDA, {native(torch.device('cuda')).device_count()} devices"


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
            "attention on a GPU: expected an hpcdecode that was built with CUDA, got one without; install it with "
            "pip install . -Ccmake.define.HPCDECODE_CUDA=ON where nvcc is",
            everywhere=True,
        )
    from hpcdecode import _attn_cuda

    return _attn_cuda


def capacity_for(layers: Sequence[LayerShape], kv_dtype: str, nbytes: int, device: torch.device) -> int:
    """Return the tokens, in whole blocks, that fit in `nbytes`."""
    module = native(device)
    block = module.block_bytes(native_shapes(layers, module.LayerShape), kv_dtype, DEFAULT_BLOCK_TOKENS)
    return nbytes // block * DEFAULT_BLOCK_TOKENS


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
    ) -> None:
        self.device = device = torch.device(device)
        module = native(device)
        if device.type == "cuda":
            torch.cuda.init()
            self.device = device = torch.device("cuda", device.index or 0)
        try:
            cache = module.KvCache(
                native_shapes(layers, module.LayerShape),
                kv_dtype,
                capacity_tokens,
                max_sequences,
                DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens,
                device.index or 0,
            )
        except MemoryError:
            raise torch.OutOfMemoryError(f"{device} has no room for {capacity_tokens:,} tokens of KV cache") from None
        super().__init__(cache, layers, kv_dtype)
        self._capacity_error = module.CapacityError
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()

    @property
    def attend_seconds(self) -> float:
        """Return the seconds that the device took for `attend`; wait for it."""
        return self._clock.seconds()

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        try:
            self.native.extend(slots, counts, self._stream())
        except self._capacity_error as error:
            raise KvCapacityError(str(error)) from None

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`."""
        self.native.append(layer, slots, counts, kv, self._stream())

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Append and attend, as `KvCache.attend`."""
        with self._clock:
            self.native.attend(layer, slots, counts, qkv, out, sinks, self._stream())

    def _stream(self) -> int:
        """Return the address of the device's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0


class HostKvCache(CudaKvCache):
    """A `CudaKvCache` for tensors in this host's memory, which must stay as they are until the device has read them."""

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Copy to the device, then write K and V."""
        super().append(layer, slots, counts, torch.as_tensor(kv).to(self.device, non_blocking=True))

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Copy to the device, append and attend, then copy back."""
        result = torch.as_tensor(out)
        there = torch.empty(result.shape, dtype=result.dtype, device=self.device)
        super().attend(layer, slots, counts, torch.as_tensor(qkv).to(self.device, non_blocking=True), there, sinks)
        result.copy_(there, non_blocking=True)


class _HostClock:
    """A context that counts the seconds of what is done inside."""

    def __init__(self) -> None:
        self._seconds = self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += perf_counter() - self._begun

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._seconds


class _DeviceClock:
    """A context that counts the seconds, by the device's own time, of what a device is told to do inside."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._begun, self._now()))
        while self._spans and self._spans[0][1].query():
            self._count()

    def seconds(self) -> float:
        """Return the seconds so far; wait for the device."""
        if self._spans:
            self._spans[-1][1].synchronize()
        while self._spans:
            self._count()
        return self._seconds

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _count(self) -> None:
        begun, ended = self._spans.popleft()
        self._seconds += begun.elapsed_time(ended) / 1e3
