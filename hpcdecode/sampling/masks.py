"""What grammars leave of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode import _ops_cpu
from hpcdecode.sampling.grammars import MASK_BITS
from hpcdecode.system.uploads import upload

_FORBIDDEN = float("-inf")


def keep_allowed(logits: Tensor, rows: Sequence[int], masks: NDArray[np.uint32]) -> None:
    """Set the logits of tokens that masks do not allow to -inf; where all others are -inf already, these become 0.

    Args:
        logits: float32 [n, vocab], contiguous rows, changed in place.
        rows: [m], rows that have a mask.
        masks: [m, words]; bit i % 32 of word i // 32 allows token i.
    """
    if logits.device.type != "cpu":
        places, words = upload(logits.device, np.array(rows, np.int64), masks.view(np.int32))
        keep_allowed_by_torch(logits, places, words)
        return
    place = logits.data_ptr(), logits.stride(0) * logits.element_size(), logits.shape[1]
    _ops_cpu.keep_allowed(*place, list(rows), masks.ctypes.data, masks.shape[1], torch.get_num_threads())


def keep_allowed_by_torch(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Do the same on any device, with rows int64 [m] and masks int32 [m, words] there."""
    bits = torch.arange(MASK_BITS, device=logits.device, dtype=torch.int32)
    allowed = (masks.unsqueeze(2) >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    own = logits.index_select(0, rows).masked_fill_(~allowed, _FORBIDDEN)
    own.masked_fill_(allowed & (own.amax(dim=1, keepdim=True) == _FORBIDDEN), 0.0)
    logits.index_copy_(0, rows, own)
