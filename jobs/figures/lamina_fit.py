"""How the three tuned constants of Lamina's T(B) are found, and what they say of rows that they were not fitted to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from figure import show
from lamina_paper import BATCHES, COUNTS, S_DEVICE, TABLE_3
from numpy.typing import NDArray
from shapes import LAMINA, SHAPES

from hpcdecode.planning.hardware import device

_FLOP_SHARES = np.arange(0.45, 0.71, 0.01)
_WEIGHT_SHARES = np.arange(0.25, 0.71, 0.01)
_SUM_SECONDS = np.arange(0, 301, 10) * 1e-6


class Constants(NamedTuple):
    """Tuned constants, as `EfficiencyCurve` has them."""

    flop_share: float
    weight_share: float
    sum_seconds: float


def errors(name: str, constants: Constants | None = None) -> NDArray[np.float64]:
    """Return what comes out over table 3, less 1.

    Args:
        name: Of the model.
        constants: By which; None for all of the grid.

    Returns:
        [B], or of the grid [flop shares, weight shares, sum seconds, B].
    """
    size, count, a100 = SHAPES[LAMINA[name]], COUNTS[name], device(S_DEVICE)
    grid = np.meshgrid(_FLOP_SHARES, _WEIGHT_SHARES, _SUM_SECONDS, indexing="ij")
    of_flop, of_bytes, of_sums = (
        each[..., np.newaxis] for each in (grid if constants is None else map(np.array, constants))
    )
    batch, weights = np.array(BATCHES), size.layer_weights
    products = 2 * weights * batch / (of_flop * count * a100.flop_per_second)
    reading = 2 * weights / (of_bytes * count * a100.bytes_per_second)
    moved = 2 * (count - 1) / count * batch * size.hidden * 2 / a100.link_bytes_per_second
    seconds = np.hypot(products, reading) + 2 * size.layers * (moved + of_sums * (count > 1))
    found: NDArray[np.float64] = size.wire_bytes_per_token * batch / seconds / 1e9 / np.array(TABLE_3[name]) - 1
    return found


def fitted(names: Iterable[str] = tuple(TABLE_3)) -> Constants:
    """Return the constants of the grid with the least root mean square error of the rows of these models."""
    squares = sum((errors(name) ** 2).sum(-1) for name in names)
    i, j, k = np.unravel_index(np.argmin(squares), np.shape(squares))
    return Constants(float(_FLOP_SHARES[i]), float(_WEIGHT_SHARES[j]), float(_SUM_SECONDS[k]))


def left_out() -> dict[str, tuple[Constants, float]]:
    """Return, by model, constants fitted to the other two rows and the worst error of its own row."""
    found = {name: fitted(other for other in TABLE_3 if other != name) for name in TABLE_3}
    return {name: (constants, float(abs(errors(name, constants)).max())) for name, constants in found.items()}


def report() -> None:
    """Print the constants, fitted to all rows of table 3 and to all but one."""
    every = fitted()
    worst = max(float(abs(errors(name, every)).max()) for name in TABLE_3)
    rows = [("all", every, "worst of all", worst)]
    rows += [(f"all but {name}", of, f"worst of {name}", error) for name, (of, error) in left_out().items()]
    show(
        ("T(B) fitted to", "of FLOP/s", "of bytes/s", "us a sum", "", "error"),
        [(to, of[0], of[1], f"{of[2] * 1e6:.0f}", of_what, f"{error:.1%}") for to, of, of_what, error in rows],
    )
