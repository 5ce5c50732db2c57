"""What `hpcdecode calibrate` writes: a model's costs on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost


class Profile(msgspec.Struct, frozen=True):
    """ranks: on which it was measured, 1 for one process; spread: quartiles of the passes' steps over their median."""

    machine: dict[str, Any]
    model: str
    dtype: str
    kv_dtype: str
    ranks: int
    cost: Cost
    spread: dict[str, tuple[float, float]]


def read(path: str) -> Profile:
    """UserError if it is no profile."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: expected a profile that hpcdecode calibrate wrote: {error}") from None
