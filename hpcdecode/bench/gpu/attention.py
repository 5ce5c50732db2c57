"""GB/s of `attn_cuda` over K and V, and over latents, against copying on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hpcdecode.attention.base import LATENT_KV_DTYPES, KvCache
from hpcdecode.attention.open import by_kernels, open_on_device
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.bench.gpu.measure import against_copies
from hpcdecode.bench.latent import MODELS
from hpcdecode.bench.output import Case

HEADS = (1, 128), (4, 128), (8, 64)  # query heads of a KV head, dims


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


def attention(
    device: torch.device,
    batch: int,
    contexts: Sequence[int],
    kv_dtypes: Sequence[str],
    passes: int,
    heads: Sequence[tuple[int, int]] = HEADS,
) -> Iterator[Case]:
    """Yield GB/s of one layer of a Llama-like model, for `batch` sequences of each context."""
    for group, dim in heads:
        shape = LayerShape(8, dim, dim, 8 * group, dim**-0.5)
        for kv_dtype in kv_dtypes:
            yield from _cases(f"{kv_dtype}, GQA{group} d{dim}", shape, kv_dtype, device, batch, contexts, passes)


def latents(
    device: torch.device,
    batch: int,
    contexts: Sequence[int],
    kv_dtypes: Sequence[str],
    passes: int,
    names: Sequence[str] = tuple(MODELS),
) -> Iterator[Case]:
    """Yield GB/s over the latents of known models, for those of the data types that latents have."""
    for name in names:
        for kv_dtype in (each for each in kv_dtypes if each in LATENT_KV_DTYPES):
            yield from _cases(f"{kv_dtype}, {name}", MODELS[name].latent, kv_dtype, device, batch, contexts, passes)


def _cases(
    about: str,
    shape: LayerShape,
    kv_dtype: str,
    device: torch.device,
    batch: int,
    contexts: Sequence[int],
    passes: int,
) -> Iterator[Case]:
    """Verify the attention of a layer, then yield a case a context."""
    filled.verify(opened(shape, kv_dtype, filled.LENGTHS, device), shape, kv_dtype, device)
    by = "" if by_kernels([shape], kv_dtype, device) else " by torch"
    for context in contexts:
        name = f"attention{by}, {about}, {batch} sequences of {context}"
        yield _case(name, shape, kv_dtype, device, (context,) * batch, passes)


def _case(
    name: str, shape: LayerShape, kv_dtype: str, device: torch.device, lengths: tuple[int, ...], passes: int
) -> Case:
    kv_cache = opened(shape, kv_dtype, lengths, device)
    filled.fill(kv_cache, shape, lengths, device)
    given = filled.decode(shape, len(lengths), device)
    return against_copies(name, lambda: kv_cache.attend(0, *given), lambda: kv_cache.bytes_read, device, passes)
