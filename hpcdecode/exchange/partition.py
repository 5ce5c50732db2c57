"""How the attention of a model is spread over R-ranks: by request, or by head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, MixerShape, adds_to_scores, chooses_tokens, recurrent_shapes
from hpcdecode.errors import UserError

Shape = TypeVar("Shape", LayerShape, RecurrentShape, MixerShape)


def dealt_heads(shape: LayerShape) -> int:
    """Return the heads that a partition by head deals out: KV heads, or query heads where all share a latent."""
    return shape.q_heads if shape.latent else shape.kv_heads


class RankColumns(NamedTuple):
    """The columns that an R-rank has: of q, k and v, or of what else a layer's tokens bring, and of o."""

    rows: tuple[slice, ...]
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

    def check(self, shapes: Sequence[MixerShape]) -> None:
        """Raise UserError if KV heads, or value heads of states, cannot be dealt out evenly, or if all heads choose."""
        if self.by_head and chooses_tokens(shapes):
            raise UserError(
                "--partition head: expected attention to all tokens, got a model whose heads attend to what an indexer "
                "chooses, or to compressed entries; use --partition request"
            )
        if self.by_head and adds_to_scores(shapes):
            raise UserError(
                "--partition head: expected attention by q.k alone, got a model whose tokens bring biases of their "
                "scores, or sinks; use --partition request"
            )
        heads = {dealt_heads(s) if isinstance(s, LayerShape) else s.heads for s in shapes}
        heads |= {s.k_heads for s in recurrent_shapes(shapes) if s.k_heads > 1}
        odd = sorted(n for n in heads if n % self.parts) if self.by_head else []
        if odd:
            raise UserError(
                f"--partition head: expected a number of R-ranks that divides the model's heads ("
                f"{', '.join(map(str, odd))}), got {self.parts}; start more or fewer ranks, or use --partition request"
            )

    def shape(self, whole: Shape) -> Shape:
        """Return what an R-rank has of a layer: a head of q and k that all value heads share is on every R-rank."""
        if not self.by_head:
            return whole
        if isinstance(whole, LayerShape):
            kv_heads = whole.kv_heads if whole.latent else whole.kv_heads // self.parts
            heads = {"kv_heads": kv_heads, "q_heads": whole.q_heads // self.parts}
        else:
            heads = {"heads": whole.heads // self.parts, "k_heads": max(whole.k_heads // self.parts, 1)}
        return msgspec.structs.replace(whole, **heads)

    def heads(self, whole: MixerShape, rank: int) -> slice:
        """Return the query heads, or the value heads of states, of R-rank `rank`."""
        return self._own(whole.q_heads if isinstance(whole, LayerShape) else whole.heads, rank)

    def named(self, rank: int) -> int:
        """Return the R-rank that plans name for the sequences of R-rank `rank`."""
        return 0 if self.by_head else rank

    def columns(self, whole: MixerShape, rank: int) -> RankColumns:
        """Return the columns of a layer that R-rank `rank` gets and gives."""
        if isinstance(whole, LayerShape):
            rows = [self._own(width, rank) for width in (whole.q_columns, whole.k_columns, whole.v_columns)]
            if whole.latent:  # of one KV head, which every R-rank has for its query heads
                rows[1:] = [slice(0, whole.k_columns), slice(0, 0)]
        else:
            shared = 2 if whole.k_heads == 1 else 0  # q and k
            owned = [self._own(w, rank) if i >= shared else slice(0, w) for i, w in enumerate(whole.widths)]
            rows = [own for own, width in zip(owned, whole.widths, strict=True) if width]
        return RankColumns(tuple(rows), self._own(whole.out_columns, rank))

    def capacity(self, tokens: Sequence[int]) -> list[int]:
        """Return the KV tokens of the R-ranks that plans name, from what each R-rank has room for."""
        return [min(tokens)] if self.by_head else list(tokens)

    def speeds(self, speeds: Sequence[float]) -> list[float]:
        """Return the relative speeds of the R-ranks that plans name, from those of all."""
        return [min(speeds)] if self.by_head else list(speeds)

    def _own(self, width: int, rank: int) -> slice:
        own = width // self.parts
        return slice(rank * own, (rank + 1) * own) if self.by_head else slice(0, width)
