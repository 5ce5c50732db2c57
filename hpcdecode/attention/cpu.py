"""The KV store on this machine's cores: `native/attn_cpu` in C++."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import KvCapacityError, LayerShape, NativeKvCache, native_shapes
from hpcdecode.errors import UserError
from hpcdecode.system.cores import nodes_of


class CpuKvCache(NativeKvCache):
    """The C++ backend; see KvCache for the verbs."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int | None,
        threads: int,
        cpus: Sequence[int] | None,
        nodes: Sequence[int] | None,
        team: bool,
    ) -> None:
        cpus = list(cpus or ())
        try:
            engine = _attn_cpu.Engine(
                native_shapes(layers),
                kv_dtype,
                capacity_tokens,
                max_sequences,
                block_tokens,
                threads,
                cpus,
                os.environ.get("HPCDECODE_ISA", ""),
                nodes_of(cpus) if nodes is None else list(nodes),
                team,
            )
        except RuntimeError as error:  # the system maps no more memory
            raise UserError(f"{error}: lower --kv-memory, or give the process more memory") from error
        super().__init__(engine, layers, kv_dtype)
        self.isa = engine.isa
        self.threads = engine.threads
        self.append = engine.append
        self.attend = engine.attend
        self.read_seconds = engine.read_seconds

    def extend(self, slots: Any, counts: Any) -> None:
        try:
            self._engine.extend(slots, counts)
        except _attn_cpu.CapacityError as error:
            raise KvCapacityError(str(error)) from None

    def step_attention(self, slots: Any, dtype: str, sinks: list[Any]) -> _attn_cpu.StepAttention:
        """The attention of one new token of each of `slots`, for a chain; sinks: of every layer, float32 or None."""
        return _attn_cpu.StepAttention(self._engine, slots, dtype, sinks)

    @property
    def node_free_blocks(self) -> list[int]:
        """Free blocks of each NUMA node, in the order of the nodes' numbers."""
        return self._engine.node_free_blocks

    @property
    def attend_seconds(self) -> float:
        return self._engine.attend_seconds
