"""A machine's costs, measured: every part alone, on all cores that this process was given."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from hpcdecode.attention import KvStore, LayerShape, PromptAttention, bytes_per_token, capacity_for, open_store
from hpcdecode.errors import UserError
from hpcdecode.model import SplitModel, load_split
from hpcdecode.perf.cost import Cost
from hpcdecode.perf.result import machine, seconds_of

_TOKENS = (1, 8, 32, 64, 128, 256, 512)
_CONTEXTS = (64, 256, 1024, 4096)
_SEQUENCES = 64  # at each of them, or as many as fit in _KV_BYTES
_KV_BYTES = 512 << 20
_PROMPT = 512  # tokens


class Profile(msgspec.Struct, frozen=True):
    """cost: with nothing on the wire; spread: quartiles of single passes over their median, by what was measured."""

    machine: dict[str, Any]
    model: str
    dtype: str
    kv_dtype: str
    cost: Cost
    spread: dict[str, tuple[float, float]]


def read(path: str) -> Profile:
    """UserError if it is no profile."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: expected a profile that hpcdecode calibrate wrote: {error}") from None


class Calibration:
    """Measures a model on this process's cores. Figures are medians of `passes`, after one that is not counted."""

    def __init__(self, directory: str, dtype: str, kv_dtype: str, passes: int):
        self.directory, self.dtype, self.kv_dtype, self.passes = directory, dtype, kv_dtype, passes
        self.cpus = sorted(os.sched_getaffinity(0))
        torch.set_num_threads(len(self.cpus))
        self.model: SplitModel = load_split(directory, dtype=dtype)
        self.shapes: tuple[LayerShape, ...] = self.model.attends
        self.spread: dict[str, tuple[float, float]] = {}

    def profile(self) -> Profile:
        with torch.inference_mode():
            products = [self._products(count) for count in _TOKENS]
            attend, row = self._attention()
            cost = Cost(
                layers=len(self.shapes),
                tokens=list(_TOKENS),
                body=[body for body, _ in products],
                logits=[logits for _, logits in products],
                attend=attend,
                row=row,
                prefill=self._prefill(),
                wire=0.0,
                latency=0.0,
            )
        return Profile(machine(), self.directory, self.dtype, self.kv_dtype, cost, self.spread)

    def _median(self, name: str, call: Callable[[], Any]) -> float:
        call()
        seconds = [seconds_of(call) for _ in range(self.passes)]
        median = statistics.median(seconds)
        low, high = np.quantile(seconds, [0.25, 0.75]) / median
        self.spread[name] = (round(float(low), 3), round(float(high), 3))
        return median

    def _products(self, count: int) -> tuple[float, float]:
        """T(count), and seconds of so many tokens' logits."""
        ids = torch.zeros(count, dtype=torch.int64)
        start = (ids, torch.arange(count), torch.arange(count))
        last: tuple = ()

        def body() -> None:
            nonlocal last
            o, context = None, start
            for layer in range(len(self.shapes)):
                *_, context = self.model.slice(layer, o, context)
                o = self.model.empty_output(layer, count).zero_()
            last = (o, context)

        seconds = self._median(f"T({count})", body)
        return seconds, self._median(f"logits of {count}", lambda: self.model.logits(*last))

    def _attention(self) -> tuple[float, float]:
        """Seconds of a cached token, and of a sequence beyond: a line through all contexts, by relative error."""
        sizes, seconds = [], []
        width = bytes_per_token(self.shapes, self.kv_dtype)
        for context in _CONTEXTS:
            count = int(min(max(_KV_BYTES / width / context, 1), _SEQUENCES))
            sizes.append((count * (context + 1), count))
            seconds.append(self._attended(context, count))
        scaled = np.array(sizes) / np.array(seconds)[:, None]
        attend, row = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
        return float(max(attend, 0.0)), float(max(row, 0.0))

    def _attended(self, context: int, count: int) -> float:
        store = self._filled(context, count)
        slots, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
        rows = torch.randn(count, max(s.row_columns for s in self.shapes)).to(getattr(torch, self.dtype))
        outs = [torch.empty(count, s.out_columns, dtype=rows.dtype) for s in self.shapes]

        def attend() -> None:
            store.extend(slots, ones)
            for layer, shape in enumerate(self.shapes):
                store.attend(layer, slots, ones, rows[:, : shape.row_columns], outs[layer], None)
            for slot in range(count):
                store.truncate(slot, context)

        return self._median(f"attention of {count} x {context}", attend)

    def _filled(self, context: int, count: int) -> KvStore:
        store = open_store(
            self.shapes,
            kv_dtype=self.kv_dtype,
            capacity_tokens=max(count * (context + 128), capacity_for(self.shapes, self.kv_dtype, 1 << 20)),
            max_sequences=count,
            threads=len(self.cpus),
            cpus=self.cpus,
        )
        random = torch.randn(context, max(s.kv_columns for s in self.shapes)).to(getattr(torch, self.dtype))
        for slot in range(count):
            store.extend([slot], [context])
            for layer, shape in enumerate(self.shapes):
                store.append(layer, [slot], [context], random[:, : shape.kv_columns].contiguous())
        return store

    def _prefill(self) -> float:
        """Seconds of a query and a key of a prompt, all layers."""
        prompts = PromptAttention(self.shapes, dtype=self.dtype, threads=len(self.cpus), cpus=self.cpus)
        inputs = []
        for layer, s in enumerate(self.shapes):
            columns = (s.q_heads * s.k_dim, s.kv_heads * s.k_dim, s.kv_heads * s.v_dim, s.out_columns)
            tensors = [torch.randn(_PROMPT, n).to(getattr(torch, self.dtype)) for n in columns]
            inputs.append((torch.empty(prompts.packed_bytes(layer, _PROMPT), dtype=torch.uint8), *tensors))

        def attend() -> None:
            for layer, (packed, *tensors) in enumerate(inputs):
                prompts.attend(layer, [packed], [0], [_PROMPT], *tensors)

        return self._median(f"prompt of {_PROMPT}", attend) / (_PROMPT * (_PROMPT + 1) // 2)
