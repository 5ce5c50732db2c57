"""Compressed attention while a model is traced (DeepSeek-V4, section 2.3).

A compressor makes one entry of every `compress_rate` tokens: of each channel the mean of what the tokens have for it,
weighted by the softmax of their gates, then normalised and rotated as the first of them. A token attends to its window
of tokens and to the entries of all windows that are complete, or to those of them that an indexer chooses.

The mean is a state of fixed size, `hpcdecode::compress`. Each token computes the entry that its window has so far, and
brings it to the attention, which keeps that of a window's last token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"  # in a config's layer_types
COMPRESSED = frozenset({HEAVY, SPARSE})


class CompressedRows(NamedTuple):
    """What tokens bring to attention over compressed entries.

    Attributes:
        rate: Tokens of an entry.
        entry: Entries as of each token, [T, k_dim].
        topk: Number of entries that an indexer chooses; 0 for all.
        heads: Its heads.
        index_rows: Queries [T, heads * dim], head weights [T, heads] and keys [T, dim] of the indexer, if there is one.
    """

    rate: int
    entry: torch.Tensor
    topk: int = 0
    heads: int = 0
    index_rows: tuple[torch.Tensor, ...] = ()


class _LastRows:
    """What the compressor that ran last has computed, for the attention that comes next."""

    last: CompressedRows | None = None


def take_compressed_rows() -> CompressedRows | None:
    """Return what tokens bring to the attention that runs now beside its own rows; None if it has no entries."""
    rows, _LastRows.last = _LastRows.last, None
    return rows


def heavily(self: Any, hidden_states: torch.Tensor, _: object, positions: torch.Tensor, *__: object) -> Nothing:
    """Compute the entries of a compressor whose windows do not overlap, as `sparsely`."""
    values, gates = _values(self, hidden_states, positions)
    entry = _entries(self, _means(values, gates, self.compress_rate, overlaps=False), positions)
    _LastRows.last = CompressedRows(self.compress_rate, entry[0])
    return _nothing(entry)


def sparsely(
    self: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, positions: torch.Tensor, *_: object
) -> Nothing:
    """Compute the entries of a compressor with an indexer, whose own keys are compressed alike.

    Factors that all index scores have in common change no choice, and are left out.

    Args:
        self: Module of transformers.
        hidden_states: Input of the attention, [1, T, hidden].
        q_residual: Latent of its queries, [1, T, rank].
        positions: Positions of the tokens, [1, T].

    Returns:
        No entries, and no mask, for the attention of transformers.
    """
    import torch

    indexer, rate = self.indexer, self.compress_rate
    own, keys = (_values(m, hidden_states, positions) for m in (self, indexer))
    values, gates = (
        torch.cat([part for pair in zip(a.chunk(2, -1), b.chunk(2, -1), strict=True) for part in pair], -1)
        for a, b in zip(own, keys, strict=True)
    )
    means = _means(values, gates, rate, overlaps=True)
    entry = _entries(self, means[..., : self.head_dim], positions)
    index_key = _entries(indexer, means[..., self.head_dim :], positions)
    queries = indexer.q_b_proj(q_residual).unflatten(-1, (indexer.num_heads, indexer.head_dim)).transpose(1, 2)
    queries = _rotated(indexer, queries, positions).transpose(1, 2).flatten(2)
    weights = indexer.scorer.weights_proj(hidden_states)
    rows = tuple(x[0] for x in (queries, weights, index_key))
    _LastRows.last = CompressedRows(rate, entry[0], indexer.index_topk, indexer.num_heads, rows)
    return _nothing(entry)


def _values(module: Any, hidden_states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of a compressor's tokens, and their gates in float32, [1, T, channels] each."""
    place = positions % module.compress_rate
    return module.kv_proj(hidden_states), module.gate_proj(hidden_states).float() + module.position_bias.float()[place]


def _means(values: torch.Tensor, gates: torch.Tensor, rate: int, *, overlaps: bool) -> torch.Tensor:
    import torch

    means: torch.Tensor = torch.ops.hpcdecode.compress(values[0], gates[0], rate, overlaps)
    return means[None]


def _entries(module: Any, means: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return means [1, T, dim], normalised and rotated as the first token of each one's window."""
    first = positions // module.compress_rate * module.compress_rate
    return _rotated(module, module.kv_norm(means)[:, None], first)[:, 0]


def _rotated(module: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return x [1, heads, T, dim] rotated."""
    rotate: Callable[..., torch.Tensor] = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
    cos, sin = module.rotary_emb(x, position_ids=positions, layer_type=module.rope_layer_type)
    return rotate(x, cos, sin)


Nothing = tuple["torch.Tensor", None]


def _nothing(entry: torch.Tensor) -> Nothing:
    return entry[:, None, :0], None


def grouped(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the projection of each group of heads by weights of its own, [1, T, groups, out]; x: [1, T, groups, in].

    A batched product of torch would round by the number of tokens.
    """
    import torch

    from hpcdecode.model.frontend import head_linear

    head_linear.define()
    weight = self.weight.unflatten(0, (self.n_groups, -1))
    projected: torch.Tensor = torch.ops.hpcdecode.head_linear(x[0].flatten(1), weight)
    by_group: torch.Tensor = projected.unflatten(-1, (self.n_groups, -1))
    return by_group[None]


COMPRESSORS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "DeepseekV4GroupedLinear": lambda _: grouped,
    "DeepseekV4HCACompressor": lambda _: heavily,
    "DeepseekV4CSACompressor": lambda _: sparsely,
}
