"""Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number depends only on its key and counter, never on what was drawn before it.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds over counter [..., 4] and key [..., 2], both uint64 holding 32-bit words; returns [..., 4]."""
    c0, c1, c2, c3 = np.moveaxis(counter, -1, 0)
    k0, k1 = np.moveaxis(key, -1, 0)
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1)


def uniform(seed: np.ndarray, row: np.ndarray, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One float64 in (0, 1) for each (seed, row, sample, position); all int64 [n], row < 2^48, sample < 2^16."""
    seed, row, sample, position = (x.astype(np.uint64) for x in (seed, row, sample, position))
    high = ((row >> _SHIFT) << np.uint64(16)) | sample
    words = philox4x32(
        np.stack((row & _LOW, high & _LOW, position & _LOW, position >> _SHIFT), axis=-1),
        np.stack((seed & _LOW, seed >> _SHIFT), axis=-1),
    )
    bits = (words[..., 0] << np.uint64(20)) | (words[..., 1] >> np.uint64(12))  # 52 bits
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
