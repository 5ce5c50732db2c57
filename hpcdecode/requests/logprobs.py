"""Log-probabilities of tokens, as they travel from the sampler to the results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Logprobs(msgspec.Struct, array_like=True):
    """Of a run of tokens, one after the other: natural logarithms, from the model's logits as they are.

    A token without one (the first of a prompt) has NaN, and no likely tokens.
    """

    chosen: list[float] = []  # of the token itself
    top_ids: list[list[int]] = []  # the most likely tokens, most likely first
    top: list[list[float]] = []  # and theirs

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def width(self) -> int:
        """The most likely tokens that any of the tokens has."""
        return max(map(len, self.top_ids), default=0)

    @property
    def total(self) -> float:
        """Of all of them together."""
        return sum(self.chosen)

    def add(self, chosen: float, top_ids: list[int], top: list[float]) -> None:
        self.chosen.append(chosen)
        self.top_ids.append(top_ids)
        self.top.append(top)


def columns_of(
    runs: Sequence[tuple[int, Logprobs | None]], chosen: str, top_ids: str, top: str
) -> dict[str, np.ndarray]:
    """Columns under the three names: float32 [total], int32 and float32 [total, k]; none that no run has values for.

    runs: the number of tokens of each, and theirs. What is not there is NaN, or -1 for a token id.
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
            columns[chosen][start : start + length] = held.chosen
            for at, (ids, values) in enumerate(zip(held.top_ids, held.top, strict=True), start):
                columns[top_ids][at, : len(ids)] = ids
                columns[top][at, : len(ids)] = values
        start += length
    return columns if width else {chosen: columns[chosen]}
