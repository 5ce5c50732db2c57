"""Log-probabilities of tokens, as they travel from the sampler to the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.errors import InvariantViolation


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a run of tokens: natural logarithms, from the model's logits as they are.

    A token without one (the first of a prompt) has NaN, and no likely tokens.

    Attributes:
        chosen: of the token itself.
        top_ids: the most likely tokens, most likely first.
        top: of these.
    """

    chosen: list[float] = []
    top_ids: list[list[int]] = []
    top: list[list[float]] = []

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def width(self) -> int:
        """Return the most likely tokens that any token has."""
        return max(map(len, self.top_ids), default=0)

    @property
    def total(self) -> float:
        """Return the sum of all."""
        return sum(self.chosen)

    def copy(self) -> Logprobs:
        """Return the same values; tokens that are added to one of the two are not added to the other."""
        return Logprobs(list(self.chosen), list(self.top_ids), list(self.top))

    def part(self, begin: int, end: int) -> Logprobs:
        """Return those of the tokens [begin, end)."""
        return Logprobs(self.chosen[begin:end], self.top_ids[begin:end], self.top[begin:end])

    def add(self, chosen: float, top_ids: list[int], top: list[float]) -> None:
        """Append a token's."""
        self.chosen.append(chosen)
        self.top_ids.append(top_ids)
        self.top.append(top)


def columns_of(
    runs: Sequence[tuple[int, Logprobs | None]], chosen: str, top_ids: str, top: str
) -> dict[str, NDArray[Any]]:
    """Return columns of several runs: float32 [total], int32 [total, k] and float32 [total, k].

    What a token does not have is NaN, or -1 for a token id. A column that no run has values for is left out.

    Args:
        runs: number of tokens, and their log-probabilities or None, of each.
        chosen: name of the first column.
        top_ids: name of the second.
        top: name of the third.

    Raises:
        InvariantViolation: A run has log-probabilities of another number of tokens than it has.
    """
    width = max((held.width for _, held in runs if held is not None), default=0)
    if all(held is None for _, held in runs):
        return {}
    total = sum(length for length, _ in runs)
    columns = {
        chosen: np.full(total, np.nan, np.float32),
        top_ids: np.full((total, width), -1, np.int32),
        top: np.full((total, width), np.nan, np.float32),
    }
    start = 0
    for length, held in runs:
        if held is not None:
            if len(held) != length:
                raise InvariantViolation("a log-probability for each token", f"expected {length}, got {len(held)}")
            columns[chosen][start : start + length] = held.chosen
            for at, (ids, values) in enumerate(zip(held.top_ids, held.top, strict=True), start):
                columns[top_ids][at, : len(ids)] = ids
                columns[top][at, : len(ids)] = values
        start += length
    return columns if width else {chosen: columns[chosen]}
