"""GB/s of kernels over recurrent states, and tokens/s of prompts through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from hpcdecode.attention.device_states import DeviceStateStore
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.bench.device_clock import device_seconds
from hpcdecode.bench.gpu.measure import against_copies
from hpcdecode.bench.output import Case
from hpcdecode.bench.stateful_layers import KNOWN, exact, random_numbers, random_rows
from hpcdecode.report.benchmark import case

_PROMPTS, _PROMPT_TOKENS = 8, 512
_TOLERANCE = 2**-7  # share of the largest output; bfloat16 rows and outputs


def states(device: torch.device, batch: int, passes: int, names: Sequence[str] = tuple(KNOWN)) -> Iterator[Case]:
    """Yield GB/s of a token of each of `batch` sequences, and tokens/s of prompts, through layers of known models."""
    for name in names:
        layer = KNOWN[name]
        for by_kernels in (True, False):
            verify_states(layer, device, by_kernels)
        yield _decode_case(f"states of {name}, {batch} sequences", layer, batch, device, passes)
        yield _prompt_case(f"prompts through states of {name}", layer, device, passes)


def _decode_case(about: str, layer: RecurrentShape, batch: int, device: torch.device, passes: int) -> Case:
    store = _store(layer, batch, device)
    return against_copies(about, _advances(store, layer, batch, 1), lambda: store.bytes_moved, device, passes)


def _prompt_case(about: str, layer: RecurrentShape, device: torch.device, passes: int) -> Case:
    """Return tokens/s of kernels, against torch's operations in turn."""
    tokens = _PROMPT_TOKENS if device.type == "cuda" else 16
    works = [_advances(_store(layer, _PROMPTS, device, by), layer, _PROMPTS, tokens) for by in (True, False)]
    rates, ratios = [], []
    for _ in range(passes + 1):
        kernels, torch_seconds = (device_seconds(work, device, 1) for work in works)
        rates.append(_PROMPTS * tokens / kernels)
        ratios.append(torch_seconds / kernels)
    return case(f"{about}, {_PROMPTS} of {tokens} tokens", rates[1:], "tokens/s", "torch's operations", ratios[1:])


def _advances(store: DeviceStateStore, layer: RecurrentShape, sequences: int, tokens: int) -> Callable[[], None]:
    """Return what advances so many sequences by so many tokens each."""
    slots, counts = np.arange(sequences, dtype=np.int32), np.full(sequences, tokens, np.int32)
    rows = random_rows(layer, tokens, torch.bfloat16).repeat(sequences, 1).to(store.device)
    out = torch.empty(len(rows), layer.out_columns, dtype=torch.bfloat16, device=store.device)

    def step() -> None:
        store.extend(slots, counts)
        store.run(0, slots, counts, rows, out)

    return step


def verify_states(layer: RecurrentShape, device: torch.device, by_kernels: bool) -> None:
    """Compare a sequence of 40 tokens, a prompt and single ones, with float64.

    Raises:
        RuntimeError: If they differ.
    """
    store = _store(layer, 1, device, by_kernels)
    rows = random_rows(layer, 40, torch.bfloat16)
    out = torch.empty(len(rows), layer.out_columns, dtype=torch.bfloat16, device=device)
    for part, to in zip(rows.split([35, 1, 1, 3]), out.split([35, 1, 1, 3]), strict=True):
        store.extend([0], [len(part)])
        store.run(0, [0], [len(part)], part.to(device), to)
    expected = exact(layer, random_numbers(layer), rows)
    error = (expected - out.cpu().double()).abs().max().item()
    if not error <= _TOLERANCE * expected.abs().max().item():
        raise RuntimeError(f"{layer}: error {error:.3g} is out of bounds")


def _store(layer: RecurrentShape, sequences: int, device: torch.device, by_kernels: bool = True) -> DeviceStateStore:
    """Return a store of one layer with bfloat16 rows."""
    narrow, numbers = replace(layer, element_bytes=2), random_numbers(layer)
    return DeviceStateStore([narrow], [numbers], sequences, sequences, device, by_kernels=by_kernels)
