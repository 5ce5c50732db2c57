"""What `hpcdecode calibrate` writes: a model's costs on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost


class Profile(msgspec.Struct, frozen=True):
    """Measured costs, and what they were measured with.

    Attributes:
        machine: Facts of the machine, as `report.benchmark.machine` returns them.
        model: The model directory.
        dtype: Data type of weights and activations.
        kv_dtype: Data type of the KV cache.
        ranks: Number of ranks; 1 for one process.
        cost: Costs of the split into one S-rank and `ranks` - 1 R-ranks; of the process if it is one.
        spread: Quartiles of the passes' steps over their median, by load.
        replica: Costs of one of `ranks` processes of both roles, all at work; None if they were not measured.
        token_bytes: Bytes of K and V of a token; 0 if they are not known.
    """

    machine: dict[str, Any]
    model: str
    dtype: str
    kv_dtype: str
    ranks: int
    cost: Cost
    spread: dict[str, tuple[float, float]]
    replica: Cost | None = None
    token_bytes: float = 0.0

    @property
    def alone(self) -> Cost | None:
        """Return the costs of a rank of both roles, with as many others at work beside it as there are ranks."""
        return self.cost if self.ranks == 1 else self.replica


def read(path: str) -> Profile:
    """Read a profile.

    Raises:
        UserError: If the file is no profile.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: expected a profile that hpcdecode calibrate wrote: {error}") from None
