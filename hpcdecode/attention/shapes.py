"""The shapes of a model's layers that attend, and what is asked of all layers' shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from hpcdecode.attention.recurrent_shapes import RecurrentShape


class IndexerShape(msgspec.Struct, frozen=True):
    """How an indexer chooses the earlier tokens to which a token attends, its own included.

    A token's score for an earlier one is the sum over heads of weight * max(q.k, 0), of its index queries and head
    weights, and of the earlier token's index key. The tokens of the largest scores are chosen; of equal ones the first.

    Where there are local blocks, every KV head has a choice of its own, by the index head of its number: of blocks, by
    the largest q.k of their tokens. There are no head weights then.

    Attributes:
        topk: Number of tokens, or of compressed entries, that are chosen. A token attends to all if it sees no more.
        heads: Index heads; 0 for a layer that takes what the layer before it chose.
        dim: Elements of an index query head and of an index key; 0 if there are no heads.
        pool: Tokens that are chosen together, as pools, by the index key of the last one; topk is whole pools. Tokens
            behind the last whole pool are attended to as well.
        local: Blocks of `pool` tokens, the last ones, that of the token included, that are attended to beside those
            that are chosen; 0 where there are pools. Of blocks every token has an index key.
    """

    topk: int
    heads: int = 0
    dim: int = 0
    pool: int = 1
    local: int = 0

    @property
    def q_columns(self) -> int:
        """Return the columns of the index queries and of the heads' weights."""
        return self.heads * (self.dim + (not self.local))

    @property
    def chooses_from(self) -> int:
        """Return the first position whose token does not attend to all."""
        return self.topk + (self.local * self.pool if self.local else self.pool - 1)

    @property
    def most_seen(self) -> int:
        """Return the tokens, or compressed entries, that are chosen, with those of local blocks."""
        return self.topk + self.local * self.pool

    @property
    def key_tokens(self) -> int:
        """Return the tokens that have one index key, if they are no compressed entries."""
        return 1 if self.local else self.pool


class PositionBias(msgspec.Struct, frozen=True):
    """Numbers that are added to scores, before the softmax, by the distance between query and key.

    Every token brings `dim` numbers for each query head. They mix as many profiles over distances, weights of the
    layer, into its biases. A key at a distance of `extent` or more has none.

    Attributes:
        dim: Number of profiles.
        extent: Distances that have a bias: from 0, a token's own, up to `extent` - 1. If it is 0, every profile is
            minus the distance, without end (ALiBi; Press et al. 2022).
        profiles: float32 [dim, extent], of a layer with its weights; empty, which stands for zeros, without.
    """

    dim: int
    extent: int
    profiles: bytes = b""

    def values(self) -> NDArray[np.float32]:
        """Return the profiles, float32 [dim, extent]."""
        if not self.profiles:
            return np.zeros((self.dim, self.extent), np.float32)
        return np.frombuffer(self.profiles, np.float32).reshape(self.dim, self.extent)


class LayerShape(msgspec.Struct, frozen=True, tag="attention"):
    """The shape of one attention layer of the model.

    Attributes:
        kv_heads: Number of key and value heads.
        k_dim: Elements of a query head and of a key head.
        v_dim: Elements of a value head.
        q_heads: Number of query heads, a multiple of kv_heads.
        scale: Factor of every score q.k.
        window: Positions that a query sees, its own included, or None for all.
        softcap: Bound c of scores, which become c * tanh(score / c), or None.
        sinks: True if every head has one more logit in the softmax's denominator.
        latent: True if the values are the first v_dim elements of K, which rows and the KV cache then have once. Such a
            layer has one KV head.
        indexer: What chooses the tokens that a token attends to, or None for all that it sees. Index queries and
            weights follow q in a row, the index key follows k.
        chunked: True if a query sees the positions of its own chunk of `window` positions alone, up to its own.
        compress_rate: Tokens of which each compressed entry is made; 0 if there are none (DeepSeek-V4, section 2.3).
            A query sees the entries whose tokens all came, or those of them that the indexer chooses, beside the tokens
            of its window. Such a layer is latent. Every row has an entry behind k, of as many elements, and the index
            key behind that; those of the last token of each compress_rate are kept.
        bias: What is added to scores by distance, or None for nothing. Its numbers follow q in a row.
        row_sinks: True if every token brings one more logit for each of its query heads, as `sinks` are of a layer's
            heads. They follow q and the numbers of biases in a row.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    q_heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False
    indexer: IndexerShape | None = None
    chunked: bool = False
    compress_rate: int = 0
    bias: PositionBias | None = None
    row_sinks: bool = False

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first position that a query sees, for queries at `positions`."""
        if self.window is None:
            return np.zeros_like(positions)
        return positions // self.window * self.window if self.chunked else np.maximum(positions + 1 - self.window, 0)

    @property
    def kept_tokens(self) -> int | None:
        """Return how many tokens a KV cache keeps that gives up what leaves windows; None for all."""
        return None if self.compress_rate else self.window  # entries lie among the tokens

    @property
    def chooses_from(self) -> int | None:
        """Return the first position whose query attends to what is chosen, or to entries; None if none does."""
        if self.compress_rate:
            return 0
        return None if self.indexer is None else self.indexer.chooses_from

    @property
    def key_tokens(self) -> int:
        """Return how many tokens have one index key; 0 without an indexer."""
        return 0 if self.indexer is None else self.compress_rate or self.indexer.key_tokens

    @property
    def group(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_columns(self) -> int:
        """Return the columns of a `[k | v]` row."""
        return self.k_columns + self.v_columns

    @property
    def k_columns(self) -> int:
        """Return the columns of a k row, those of the entry and of the index key included."""
        return self.own_k_columns + self.entry_columns + (self.indexer.dim if self.indexer else 0)

    @property
    def entry_columns(self) -> int:
        """Return the columns of a compressed entry."""
        return self.own_k_columns if self.compress_rate else 0

    @property
    def own_k_columns(self) -> int:
        """Return the columns of a k row without the entry's and the index key's."""
        return self.kv_heads * self.k_dim

    @property
    def v_columns(self) -> int:
        """Return the columns of a v row: none if the values are in K."""
        return 0 if self.latent else self.kv_heads * self.v_dim

    @property
    def q_columns(self) -> int:
        """Return the columns of a q row, those of biases, sinks, and index queries and weights included."""
        sinks = self.q_heads if self.row_sinks else 0
        return self.own_q_columns + self.bias_columns + sinks + (self.indexer.q_columns if self.indexer else 0)

    @property
    def bias_columns(self) -> int:
        """Return the columns of the numbers that mix profiles of biases."""
        return 0 if self.bias is None else self.q_heads * self.bias.dim

    @property
    def own_q_columns(self) -> int:
        """Return the columns of the queries of a q row."""
        return self.q_heads * self.k_dim

    @property
    def row_columns(self) -> int:
        """Return the columns of a `[q | k | v]` row."""
        return self.q_columns + self.kv_columns

    @property
    def out_columns(self) -> int:
        """Return the columns of an output row."""
        return self.q_heads * self.v_dim


MixerShape: TypeAlias = LayerShape | RecurrentShape


def attention_shapes(shapes: Sequence[MixerShape]) -> list[LayerShape]:
    """Return the shapes of those layers that attend."""
    return [s for s in shapes if isinstance(s, LayerShape)]


def chooses_tokens(shapes: Sequence[MixerShape]) -> bool:
    """Return whether any layer attends to tokens that an indexer chooses, or to compressed entries."""
    return any(s.chooses_from is not None for s in attention_shapes(shapes))


def adds_to_scores(shapes: Sequence[MixerShape]) -> bool:
    """Return whether rows of any layer bring biases of scores, or sinks."""
    return any(s.bias is not None or s.row_sinks for s in attention_shapes(shapes))


def recurrent_shapes(shapes: Sequence[MixerShape]) -> list[RecurrentShape]:
    """Return the shapes of those layers that keep a state."""
    return [s for s in shapes if isinstance(s, RecurrentShape)]


def with_states_as(shapes: Sequence[MixerShape], state_dtype: str, lookahead: int = 0) -> list[MixerShape]:
    """Return the shapes of layers whose states are kept in a data type, so that sequences may be truncated.

    Args:
        shapes: Shapes of all layers.
        state_dtype: Data type of states, one of STATE_DTYPES.
        lookahead: Tokens by which sequences may be truncated.
    """
    kept = {"state_dtype": state_dtype, "lookahead": lookahead}
    return [replace(s, **kept) if isinstance(s, RecurrentShape) else s for s in shapes]


def state_dtype_of(shapes: Sequence[MixerShape]) -> str:
    """Return the data type that states are kept as, float32 if no layer keeps one."""
    return next((s.state_dtype for s in recurrent_shapes(shapes)), "float32")


def places_of(shapes: Sequence[MixerShape]) -> list[int]:
    """Return for each layer its index among those of its kind, that attend or keep a state."""
    counts: Counter[type[LayerShape | RecurrentShape]] = Counter()
    places = []
    for shape in shapes:
        places.append(counts[type(shape)])
        counts[type(shape)] += 1
    return places


def state_bytes(shapes: Sequence[MixerShape]) -> int:
    """Return the bytes of a sequence's state over all layers."""
    return sum(s.state_bytes for s in recurrent_shapes(shapes))
