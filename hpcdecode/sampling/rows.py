"""Rows of logits, and values for them, without waiting for the device that has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcdecode.system.uploads import upload

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


def rows_of(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor, or the tensor itself if they are all of its rows in order."""
    if len(rows) == len(x) and all(row == place for place, row in enumerate(rows)):
        return x
    return x.index_select(0, values_on(x.device, rows, torch.int64))


def values_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return values on a device, of dtype float32, float64 or int64."""
    (made,) = upload(device, np.array(values, _NUMPY[dtype]))
    return made
