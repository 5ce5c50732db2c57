"""How the attention of a model is spread over R-ranks: by request, or by head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hpcdecode.attention.base import LayerShape
from hpcdecode.errors import UserError


@dataclasses.dataclass(frozen=True)
class Partition:
    """Over `parts` R-ranks. kind `request`: each holds all heads of its own sequences; `head`: each its heads of all.

    Where it is by head, plans name R-rank 0 for all of them.
    """

    kind: str
    parts: int

    @property
    def by_head(self) -> bool:
        return self.kind == "head" and self.parts > 1

    def check(self, shapes: Sequence[LayerShape]) -> None:
        """UserError where KV heads cannot be dealt out evenly."""
        odd = sorted({s.kv_heads for s in shapes if s.kv_heads % self.parts}) if self.by_head else []
        if odd:
            raise UserError(
                f"--partition head: expected a number of R-ranks that divides the model's KV heads ("
                f"{', '.join(map(str, odd))}), got {self.parts}; start more or fewer ranks, or use --partition request"
            )

    def shape(self, whole: LayerShape) -> LayerShape:
        """What an R-rank has of a layer."""
        if not self.by_head:
            return whole
        heads = {"kv_heads": whole.kv_heads // self.parts, "q_heads": whole.q_heads // self.parts}
        return dataclasses.replace(whole, **heads)

    def heads(self, whole: LayerShape, rank: int) -> slice:
        """The query heads of R-rank `rank`."""
        return self._own(whole.q_heads, rank)

    def named(self, rank: int) -> int:
        """The R-rank that plans name for the sequences of R-rank `rank`."""
        return 0 if self.by_head else rank

    def columns(self, whole: LayerShape, rank: int) -> tuple[slice, slice, slice, slice]:
        """Of q, k, v and o: what R-rank `rank` gets and gives."""
        s = whole
        widths = (s.q_columns, s.kv_heads * s.k_dim, s.kv_heads * s.v_dim, s.out_columns)
        return tuple(self._own(width, rank) for width in widths)

    def capacity(self, tokens: Sequence[int]) -> list[int]:
        """KV tokens by the R-ranks that plans name, from what each R-rank has room for."""
        return [min(tokens)] if self.by_head else list(tokens)

    def speeds(self, speeds: Sequence[float]) -> list[float]:
        """The same of how fast they are."""
        return [min(speeds)] if self.by_head else list(speeds)

    def _own(self, width: int, rank: int) -> slice:
        own = width // self.parts
        return slice(rank * own, (rank + 1) * own) if self.by_head else slice(0, width)
