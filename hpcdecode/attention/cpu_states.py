"""The store of recurrent states on this machine's cores: `native/attn_cpu` in C++."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import KvCache, native_states
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.errors import UserError
from hpcdecode.system.cores import nodes_of


class CpuStateStore:
    """A `StateStore` on CPUs. Rows and states are float32 or bfloat16, as the shapes say.

    Args:
        layers: Shapes of the recurrent layers.
        weights: Their weights.
        max_sequences: Slots are 0 to max_sequences - 1.
        threads: Number of threads, the calling one included.
        cpus: One CPU per thread to pin workers to, or None.
        team: True to run on torch's OpenMP threads.
        beside: KV cache whose threads are used in place of others, or None.

    Attributes:
        native: The native store.
        state_bytes: Bytes of a sequence's states of all layers, as reserved.

    Raises:
        ValueError: If an argument is bad.
        UserError: If the system maps no more memory.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentShape],
        weights: Sequence[RecurrentWeights],
        max_sequences: int,
        threads: int,
        cpus: Sequence[int] | None,
        team: bool,
        beside: KvCache | None,
    ) -> None:
        cpus = list(cpus or ())
        forced = os.environ.get("HPCDECODE_ISA", "")
        shared = beside.native if isinstance(beside, CpuKvCache) else None
        try:
            self.native = _attn_cpu.StateStore(
                native_recurrent(layers),
                weights,
                row_dtype(layers),
                layers[0].state_dtype,
                max_sequences,
                threads,
                cpus,
                forced,
                nodes_of(cpus),
                team,
                shared,
                layers[0].lookahead,
            )
        except RuntimeError as error:  # the system maps no more memory
            raise UserError(f"{error}: lower --batch, or give the process more memory") from error
        native = self.native
        self.state_bytes = native.state_bytes
        self.extend = native.extend
        self.run = native.run
        self.release = native.release
        self.fork = native.fork
        self.truncate = native.truncate
        self.length = native.length
        self.check = native.check
        self.rewrite_seconds = native.rewrite_seconds

    @property
    def open_slots(self) -> int:
        """Return the number of open slots."""
        return self.native.open_slots

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of state that `run` has read and written so far."""
        return self.native.bytes_moved

    @property
    def run_seconds(self) -> float:
        """Return the seconds spent in `run` so far."""
        return self.native.run_seconds


def native_recurrent(layers: Sequence[RecurrentShape]) -> list[_attn_cpu.RecurrentShape]:
    """Return shapes as objects of the native module."""
    return native_states(layers, _attn_cpu.RecurrentShape)


def row_dtype(layers: Sequence[RecurrentShape]) -> str:
    """Return the data type of rows."""
    return "bfloat16" if layers[0].element_bytes == 2 else "float32"


def reserved_bytes(layers: Sequence[RecurrentShape]) -> int:
    """Return the bytes that a `CpuStateStore` reserves for a sequence; 0 without layers."""
    forced = os.environ.get("HPCDECODE_ISA", "")
    if not layers:
        return 0
    first = layers[0]
    return _attn_cpu.state_bytes(
        native_recurrent(layers), row_dtype(layers), first.state_dtype, forced, first.lookahead
    )
