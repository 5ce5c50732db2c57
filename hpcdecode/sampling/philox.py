"""Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number depends only on its key and counter, never on what was drawn before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the ten rounds of Philox4x32 over counters and keys, all uint64 that hold 32-bit words.

    Args:
        counter: [..., 4].
        key: [..., 2].

    Returns:
        Random words, [..., 4].
    """
    c0, c1, c2, c3 = np.moveaxis(counter, -1, 0)
    k0, k1 = np.moveaxis(key, -1, 0)
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1)


def uniform(
    seed: NDArray[np.int64], line: NDArray[np.int64], sample: NDArray[np.int64], position: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return one random number in (0, 1) for each (seed, line, sample, position).

    Args:
        seed: [n].
        line: [n], the request's line in the prompt files, below 2^48.
        sample: [n], below 2^16.
        position: [n], the number of tokens generated before.

    Returns:
        float64 [n].
    """
    keys, lines, samples, positions = (x.astype(np.uint64) for x in (seed, line, sample, position))
    high = ((lines >> _SHIFT) << np.uint64(16)) | samples
    words = philox4x32(
        np.stack((lines & _LOW, high & _LOW, positions & _LOW, positions >> _SHIFT), axis=-1),
        np.stack((keys & _LOW, keys >> _SHIFT), axis=-1),
    )
    bits: NDArray[np.uint64] = (words[..., 0] << np.uint64(20)) | (words[..., 1] >> np.uint64(12))  # 52 bits
    numbers: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return numbers
