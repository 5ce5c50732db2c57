"""Opens KV caches on a device and attends, for a sanitizer to watch: python -m hpcdecode.bench.gpu.sanitized cuda:0.

Chunks of a prompt, single tokens, several pieces to merge, and latents, by every data type that has kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from hpcdecode.attention.base import LATENT_KV_DTYPES
from hpcdecode.attention.cuda import KV_DTYPES
from hpcdecode.attention.open import by_kernels
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.bench.device_clock import wait_for
from hpcdecode.bench.gpu.attention import opened
from hpcdecode.bench.latent import MODELS

_LENGTHS = (1, 70, 600, 1100)  # the last ones in pieces of 512 and 1,024 tokens


def cases(device: torch.device) -> Iterator[tuple[LayerShape, str]]:
    """Yield layers and data types that have kernels on a device."""
    heads, latent = LayerShape(2, 128, 128, 8, 128**-0.5), MODELS["glm-4.7-flash"].latent
    for kv_dtype in KV_DTYPES:
        yield heads, kv_dtype
        if kv_dtype in LATENT_KV_DTYPES and by_kernels([latent], kv_dtype, device):
            yield latent, kv_dtype


def main(device: torch.device) -> None:
    """Attend once in every case.

    Raises:
        RuntimeError: If an output is not finite.
    """
    for shape, kv_dtype in cases(device):
        kv_cache = opened(shape, kv_dtype, _LENGTHS, device)
        filled.fill(kv_cache, shape, _LENGTHS, device)
        given = filled.decode(shape, len(_LENGTHS), device)
        kv_cache.attend(0, *given)
        wait_for(device)
        if not given.out.cpu().isfinite().all():
            raise RuntimeError(f"{kv_dtype}, {shape}: expected finite outputs")
        print(f"attended: {kv_dtype}, {shape}", flush=True)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
