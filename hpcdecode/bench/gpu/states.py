"""GB/s of torch's operations over recurrent states, by the bytes that kernels would move, against copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from hpcdecode.attention.shapes import RecurrentShape
from hpcdecode.attention.torch_states import TorchStateStore
from hpcdecode.bench.gpu.measure import against_copies
from hpcdecode.bench.output import Case
from hpcdecode.bench.stateful_layers import KNOWN, exact, random_numbers, random_rows

_TOLERANCE = 2**-7  # share of the largest output; bfloat16 rows and outputs


def states(device: torch.device, batch: int, passes: int, names: Sequence[str] = tuple(KNOWN)) -> Iterator[Case]:
    """Yield GB/s of a token of each of `batch` sequences through recurrent layers of known models."""
    for name in names:
        layer = KNOWN[name]
        verify_states(layer, device)
        yield _state_case(f"states by torch, {name}, {batch} sequences", layer, batch, device, passes)


def _state_case(about: str, layer: RecurrentShape, batch: int, device: torch.device, passes: int) -> Case:
    store = _store(layer, batch, device)
    slots, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
    rows = random_rows(layer, 1, torch.bfloat16).repeat(batch, 1).to(device)
    out = torch.empty(batch, layer.out_columns, dtype=torch.bfloat16, device=device)

    def step() -> None:
        store.extend(slots, ones)
        store.run(0, slots, ones, rows, out)

    return against_copies(about, step, lambda: store.bytes_moved, device, passes)


def verify_states(layer: RecurrentShape, device: torch.device) -> None:
    """Compare a sequence of 40 tokens, a prompt and single ones, with float64.

    Raises:
        RuntimeError: If they differ.
    """
    store = _store(layer, 1, device)
    rows = random_rows(layer, 40, torch.bfloat16)
    out = torch.empty(len(rows), layer.out_columns, dtype=torch.bfloat16, device=device)
    for part, to in zip(rows.split([35, 1, 1, 3]), out.split([35, 1, 1, 3]), strict=True):
        store.extend([0], [len(part)])
        store.run(0, [0], [len(part)], part.to(device), to)
    expected = exact(layer, random_numbers(layer), rows)
    error = (expected - out.cpu().double()).abs().max().item()
    if not error <= _TOLERANCE * expected.abs().max().item():
        raise RuntimeError(f"{layer}: error {error:.3g} is out of bounds")


def _store(layer: RecurrentShape, sequences: int, device: torch.device) -> TorchStateStore:
    """Return a store of one layer with bfloat16 rows."""
    narrow, numbers = replace(layer, element_bytes=2), random_numbers(layer)
    return TorchStateStore([narrow], [numbers], sequences, sequences, device)
