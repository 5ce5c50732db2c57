"""Text as HDF5 stores it."""

from __future__ import annotations

import h5py
import numpy as np

STRING = h5py.string_dtype("utf-8")


def utf8(text: str) -> bytes:
    """Return text as HDF5 can store it. NUL, which ends a string in HDF5, becomes U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace")


def objects(values: list[bytes]) -> np.ndarray:
    """Return values as an object array [n], in which h5py accepts strings of any length."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
