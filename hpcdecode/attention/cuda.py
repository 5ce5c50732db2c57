"""The KV store on a device: blocks are dealt out on the host, K and V lie on the device and are attended to there.

`device` is a CUDA device; or the CPU, where the very same kernels run as a host compiler's loops, for the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from hpcdecode.attention.base import DEFAULT_BLOCK_TOKENS, KvCapacityError, LayerShape, NativeKvCache, native_shapes
from hpcdecode.errors import UserError

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")


def built() -> bool:
    """Whether this hpcdecode was built with CUDA."""
    try:
        import_module("hpcdecode._attn_cuda")
    except ImportError:
        return False
    return True


def state() -> str:
    """What `doctor` says of it."""
    if not built():
        return "built without CUDA"
    return f"built with CUDA, {native(torch.device('cuda')).device_count()} devices"


def native(device: torch.device) -> ModuleType:
    """The module that has the kernels for `device`. Raises UserError where it was not built."""
    if device.type == "cpu":
        return import_module("hpcdecode._attn_cuda_emulated")
    if not built():
        raise UserError(
            "attention on a GPU: expected an hpcdecode that was built with CUDA, got one without; install it with "
            "pip install . -Ccmake.define.HPCDECODE_CUDA=ON where nvcc is",
            everywhere=True,
        )
    return import_module("hpcdecode._attn_cuda")


def capacity_for(layers: Sequence[LayerShape], kv_dtype: str, nbytes: int, device: torch.device) -> int:
    """Tokens, in whole blocks, that fit in `nbytes`."""
    module = native(device)
    block = module.block_bytes(native_shapes(layers, module), kv_dtype, DEFAULT_BLOCK_TOKENS)
    return nbytes // block * DEFAULT_BLOCK_TOKENS


def copy_rate(device: torch.device, nbytes: int = 256 << 20) -> float:
    """Bytes per second, read and written, of copying on a device."""
    half = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    other, seconds = torch.empty_like(half), []
    for _ in range(6):
        begun = perf_counter()
        other.copy_(half)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - begun)
    return nbytes / min(seconds)


class CudaKvCache(NativeKvCache):
    """See KvCache for the verbs. Tensors are on the device; calls put their work on its current stream and return.

    Raises torch.OutOfMemoryError where the device has no room, ValueError for heads or a kv_dtype without kernels.
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
            engine = module.Engine(
                native_shapes(layers, module),
                kv_dtype,
                capacity_tokens,
                max_sequences,
                DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens,
                device.index or 0,
            )
        except MemoryError:
            raise torch.OutOfMemoryError(f"{device} has no room for {capacity_tokens:,} tokens of KV cache") from None
        super().__init__(engine, layers, kv_dtype)
        self._capacity_error = module.CapacityError
        self._clock = _Clock(self.device)

    @property
    def attend_seconds(self) -> float:
        """What the device took for `attend`; waits for it."""
        return self._clock.seconds()

    def extend(self, slots: Any, counts: Any) -> None:
        try:
            self._engine.extend(slots, counts, self._stream())
        except self._capacity_error as error:
            raise KvCapacityError(str(error)) from None

    def append(self, layer: int, slots: Any, counts: Any, kv: Any) -> None:
        self._engine.append(layer, slots, counts, kv, self._stream())

    def attend(self, layer: int, slots: Any, counts: Any, qkv: Any, out: Any, sinks: Any = None) -> None:
        with self._clock:
            self._engine.attend(layer, slots, counts, qkv, out, sinks, self._stream())

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0


class HostKvCache(CudaKvCache):
    """The same for tensors in this host's memory, which must stay as they are until the device has come so far."""

    def append(self, layer: int, slots: Any, counts: Any, kv: Any) -> None:
        super().append(layer, slots, counts, torch.as_tensor(kv).to(self.device, non_blocking=True))

    def attend(self, layer: int, slots: Any, counts: Any, qkv: Any, out: Any, sinks: Any = None) -> None:
        result = torch.as_tensor(out)
        there = torch.empty(result.shape, dtype=result.dtype, device=self.device)
        super().attend(layer, slots, counts, torch.as_tensor(qkv).to(self.device, non_blocking=True), there, sinks)
        result.copy_(there, non_blocking=True)


class _Clock:
    """As a context: counts what a device takes for what it is told inside, by its own time."""

    def __init__(self, device: torch.device):
        self._device, self._seconds = device, 0.0
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        self._begun: Any = self._now()

    def __exit__(self, *_: object) -> None:
        ended = self._now()
        if self._device.type != "cuda":
            self._seconds += ended - self._begun
            return
        self._spans.append((self._begun, ended))
        while self._spans and self._spans[0][1].query():
            self._count()

    def seconds(self) -> float:
        if self._spans:
            self._spans[-1][1].synchronize()
        while self._spans:
            self._count()
        return self._seconds

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _count(self) -> None:
        begun, ended = self._spans.popleft()
        self._seconds += begun.elapsed_time(ended) / 1e3
