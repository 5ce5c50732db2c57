"""What R-ranks on a GPU do over latents and recurrent states, of `hpcdecode bench gpu`.

Kernels attend to latents of 16 and 32 bits, torch's operations do the rest.

All is verified against float64 first. Rates are those of the bytes that kernels would move, against copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from hpcdecode.attention.base import LATENT_KV_DTYPES, KvCache
from hpcdecode.attention.open import by_kernels, open_on_device
from hpcdecode.attention.shapes import LayerShape, RecurrentShape
from hpcdecode.attention.torch_states import TorchStateStore
from hpcdecode.bench import filled
from hpcdecode.bench.device_clock import copy_bytes_per_second, device_seconds
from hpcdecode.bench.latent import MODELS
from hpcdecode.bench.output import Case
from hpcdecode.bench.stateful_layers import KNOWN, exact, random_numbers, random_rows
from hpcdecode.report.benchmark import case

_TOLERANCE = 2**-7  # share of the largest output; bfloat16 rows and outputs
_COPIED = 1 << 28  # bytes


def opened(shape: LayerShape, kv_dtype: str, lengths: Sequence[int], device: torch.device) -> KvCache:
    """Return an empty KV cache of one layer, as a job has it on this device."""
    return open_on_device(
        [shape],
        [],
        kv_dtype=kv_dtype,
        capacity_tokens=filled.capacity(tuple(lengths)),
        max_sequences=len(lengths),
        block_tokens=64,
        state_tokens=0,
        device=device,
    )


def latents(
    device: torch.device,
    batch: int,
    contexts: Sequence[int],
    kv_dtypes: Sequence[str],
    passes: int,
    names: Sequence[str] = tuple(MODELS),
) -> Iterator[Case]:
    """Yield GB/s over the latents of known models, for those of the data types that latents have."""
    asked = [(name, MODELS[name].latent, kv_dtype) for name in names for kv_dtype in kv_dtypes]
    for name, shape, kv_dtype in (each for each in asked if each[2] in LATENT_KV_DTYPES):
        filled.verify(opened(shape, kv_dtype, filled.LENGTHS, device), shape, kv_dtype, device)
        for context in contexts:
            by = "" if by_kernels([shape], kv_dtype, device) else " by torch"
            about = f"attention{by}, {kv_dtype}, {name}, {batch} sequences of {context}"
            yield _attention_case(about, shape, kv_dtype, (context,) * batch, device, passes)


def _attention_case(
    about: str, shape: LayerShape, kv_dtype: str, lengths: tuple[int, ...], device: torch.device, passes: int
) -> Case:
    kv_cache = opened(shape, kv_dtype, lengths, device)
    filled.fill(kv_cache, shape, lengths, device)
    given = filled.decode(shape, len(lengths), device)
    return _against_copies(about, lambda: kv_cache.attend(0, *given), lambda: kv_cache.bytes_read, device, passes)


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

    return _against_copies(about, step, lambda: store.bytes_moved, device, passes)


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


def _against_copies(
    about: str, work: Callable[[], None], nbytes: Callable[[], int], device: torch.device, passes: int
) -> Case:
    half = torch.empty(_COPIED // 2 if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    rates, ratios = [], []
    for _ in range(passes + 1):
        copying, before = copy_bytes_per_second(half, other), nbytes()
        seconds = device_seconds(work, device)
        rates.append((nbytes() - before) / seconds)
        ratios.append(rates[-1] / copying)
    return case(about, [r / 1e9 for r in rates[1:]], "GB/s", "copying on the device", ratios[1:])
