"""How the attention of a model is spread over R-ranks: by request, or by head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from hpcdecode.attention.base import LayerShape
from hpcdecode.errors import UserError


class RankColumns(NamedTuple):
    """The columns of q, k, v and o that an R-rank has."""

    q: slice
    k: slice
    v: slice
    o: slice


@dataclasses.dataclass(frozen=True)
class Partition:
    """The attention over `parts` R-ranks. If it is by head, plans name R-rank 0 for all of them.

    Attributes:
        kind: `request`, each R-rank holds all heads of its own sequences; `head`, its heads of all sequences.
    """

    kind: str
    parts: int

    @property
    def by_head(self) -> bool:
        """Return whether R-ranks have some heads of each sequence."""
        return self.kind == "head" and self.parts > 1

    def check(self, shapes: Sequence[LayerShape]) -> None:
        """Raise UserError if KV heads cannot be dealt out evenly."""
        odd = sorted({s.kv_heads for s in shapes if s.kv_heads % self.parts}) if self.by_head else []
        if odd:
            raise UserError(
                f"--partition head: expected a number of R-ranks that divides the model's KV heads ("
                f"{', '.join(map(str, odd))}), got {self.parts}; start more or fewer ranks, or use --partition request"
            )

    def shape(self, whole: LayerShape) -> LayerShape:
        """Return what an R-rank has of a layer."""
        if not self.by_head:
            return whole
        return dataclasses.replace(whole, kv_heads=whole.kv_heads // self.parts, q_heads=whole.q_heads // self.parts)

    def heads(self, whole: LayerShape, rank: int) -> slice:
        """Return the query heads of R-rank `rank`."""
        return self._own(whole.q_heads, rank)

    def named(self, rank: int) -> int:
        """Return the R-rank that plans name for the sequences of R-rank `rank`."""
        return 0 if self.by_head else rank

    def columns(self, whole: LayerShape, rank: int) -> RankColumns:
        """Return the columns of a layer that R-rank `rank` gets and gives."""
        k, v = whole.kv_heads * whole.k_dim, whole.kv_heads * whole.v_dim
        return RankColumns(*(self._own(width, rank) for width in (whole.q_columns, k, v, whole.out_columns)))

    def capacity(self, tokens: Sequence[int]) -> list[int]:
        """Return the KV tokens of the R-ranks that plans name, from what each R-rank has room for."""
        return [min(tokens)] if self.by_head else list(tokens)

    def speeds(self, speeds: Sequence[float]) -> list[float]:
        """Return the relative speeds of the R-ranks that plans name, from those of all."""
        return [min(speeds)] if self.by_head else list(speeds)

    def _own(self, width: int, rank: int) -> slice:
        own = width // self.parts
        return slice(rank * own, (rank + 1) * own) if self.by_head else slice(0, width)
