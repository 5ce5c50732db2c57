"""What the rows of a call attend to where indexers choose it, or where it is compressed, in torch on any device.

A row attends to units and to a run of tokens up to its own. A unit is a token, a pool or block of them, or a compressed
entry. How many of each is known on the host, so nothing is read back. Scores are computed in chunks of index keys at
absolute numbers, a group of chunks at a time, so that all products have one shape.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention import torch_reads
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.attention.torch_attend import product
from hpcdecode.attention.torch_calls import CallSequences
from hpcdecode.attention.torch_layer import StoredLayer
from hpcdecode.attention.torch_reads import Longs, RowPlaces, Wave, to_device, waves

_MOST_SCORES = 1 << 24  # of some rows at once, unless one has more
_LOW = 0xFFFFFFFF  # the half of a key that tells equal scores apart


class RowLists(NamedTuple):
    """What rows attend to.

    Attributes:
        places: Of K, int32 [rows, most]; every KV head has a row if it has a choice of its own. Behind a row's own any
            place of its sequence.
        counts: How many are a row's own, int64 [rows].
    """

    places: Tensor
    counts: Longs


class _Sight(NamedTuple):
    """What the rows of a call see, int64 [rows] each.

    Attributes:
        units: Units to choose from.
        chosen: Units that are attended to.
        tail: The first token that is attended to beside them.
        positions: Of the rows.
        tokens: Tokens of a unit.
        each: Rows of K of a unit.
    """

    units: Longs
    chosen: Longs
    tail: Longs
    positions: Longs
    tokens: int
    each: int

    @property
    def counts(self) -> Longs:
        """Return how many rows of K each row attends to."""
        return self.chosen * self.each + self.positions + 1 - self.tail


class _ScoredRows(NamedTuple):
    """Some rows for which scores decide. Tensors are on the device.

    Attributes:
        rows: Their numbers in the call, int64 [n].
        units: Units to choose from, int32 [n, 1].
        queries: Row of every item, from the first of these, int32 [items].
        begins: First index key of every item, int32 [items, 1].
        lasts: The last one that its row sees, int32 [items, 1].
        slots: Chunk of scores that every item writes, int64 [items]; that behind the last one if it is for nobody.
        chunks: Chunks of a row.
        group: Items of a group.
    """

    rows: Tensor
    units: Tensor
    queries: Tensor
    begins: Tensor
    lasts: Tensor
    slots: Tensor
    chunks: int
    group: int


def list_rows(layer: StoredLayer, call: CallSequences, by: Tensor, dtype: torch.dtype, group: int) -> RowLists:
    """Return what the rows of a call attend to.

    Args:
        layer: With an indexer that has heads, or with entries.
        call: Whose tokens have been put.
        by: Index queries and head weights of the rows, [tokens, indexer.q_columns].
        dtype: Of the products of index queries and keys: float32 or bfloat16.
        group: Chunks of index keys that are scored at once, which depends on nothing but the layer.
    """
    shape = layer.shape
    kind = shape.indexer, shape.compress_rate, shape.window
    sight = call.kept(("sight", *kind), partial(_sight_of, shape, call.rows.positions))
    lists = shape.kv_heads if shape.indexer and shape.indexer.local else 1
    most = max(int(sight.chosen.max(initial=0)), 1)
    units = torch.arange(most, dtype=torch.int32, device=call.device).expand(call.tokens, lists, most)

    def listed() -> RowLists:
        return RowLists(_places(layer, call, sight, units).flatten(0, 1), np.repeat(sight.counts, lists))

    indexer = shape.indexer
    if indexer is None or not (sight.units > sight.chosen).any():
        return call.kept(("all", *kind, lists, layer.block_rows), listed)
    units = units.contiguous()
    for wave in call.kept(("scored", *kind, group), partial(_scored, call, sight, indexer, group)):
        units[wave.rows] = _chosen(layer, call, wave, by, dtype, most)
    return listed()


def list_waves(call: CallSequences, listed: RowLists, group: int, most: int) -> list[Wave]:
    """Return what rows with lists read; arguments of `torch_reads.waves`."""
    number, width = listed.places.shape
    rows = RowPlaces(np.arange(number), listed.counts - 1, np.arange(number, dtype=np.int32)[:, None], width)
    key = "listed", listed.counts.tobytes(), width, group, most
    found = call.kept(key, lambda: waves(rows, LayerShape(1, 1, 1, 1, 1.0), group, most, call.device))
    flat = listed.places.flatten()
    return [wave.at(flat.index_select(0, wave.places.flatten()).view_as(wave.places)) for wave in found]


def _sight_of(shape: LayerShape, positions: Longs) -> _Sight:
    """Return what rows at these positions see."""
    if shape.compress_rate:
        units = (positions + 1) // shape.compress_rate
        chosen = np.minimum(units, shape.indexer.topk) if shape.indexer else units
        return _Sight(units, chosen, shape.first_seen(positions), positions, shape.compress_rate, 1)
    assert shape.indexer is not None, "expected a layer with an indexer or entries"
    tokens, local = shape.indexer.pool, shape.indexer.local
    units = np.maximum(positions // tokens + 1 - local, 0) if local else (positions + 1) // tokens
    chosen = np.minimum(units, shape.indexer.topk // tokens)
    return _Sight(units, chosen, units * tokens, positions, tokens, tokens)


def _scored(call: CallSequences, sight: _Sight, indexer: IndexerShape, group: int) -> list[_ScoredRows]:
    """Return the rows that have more units than they attend to, some at a time."""
    rows = np.flatnonzero(sight.units > sight.chosen)
    keys = sight.units[rows] * (sight.tokens if indexer.local else 1)
    chunks = -(-keys // torch_reads.CHUNK)
    heads = indexer.heads if indexer.local else 1
    each = max(_MOST_SCORES // (int(chunks.max()) * torch_reads.CHUNK * heads), 1)
    cuts = range(0, len(rows), each)
    return [
        _scored_wave(call, sight, rows[i : i + each], keys[i : i + each], chunks[i : i + each], group) for i in cuts
    ]


def _scored_wave(
    call: CallSequences, sight: _Sight, rows: Longs, keys: Longs, chunks: Longs, group: int
) -> _ScoredRows:
    real, most = int(chunks.sum()), int(chunks.max())
    items = -(-real // group) * group
    queries, of_row = np.zeros(items, np.int64), np.zeros(items, np.int64)
    queries[:real] = np.repeat(np.arange(len(rows)), chunks)
    of_row[:real] = np.arange(real) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    slots = np.full(items, len(rows) * most)
    slots[:real] = queries[:real] * most + of_row[:real]
    first, last = of_row * torch_reads.CHUNK, keys[queries] - 1
    sent = to_device([rows, sight.units[rows], queries, slots, first, last], call.device)
    number, units, of_item, of_slot, begins, lasts = sent
    return _ScoredRows(
        number.long(), units[:, None], of_item, begins[:, None], lasts[:, None], of_slot.long(), most, group
    )


def _chosen(
    layer: StoredLayer, call: CallSequences, wave: _ScoredRows, by: Tensor, dtype: torch.dtype, most: int
) -> Tensor:
    """Return the numbers of the units that rows choose, ascending, int32 [n, lists, most]."""
    indexer = layer.shape.indexer
    assert indexer is not None, "expected an indexer"
    scores = _scores(layer, call, wave, by.index_select(0, wave.rows), dtype)
    if indexer.local:
        scores = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % indexer.pool))
        scores = scores.unflatten(-1, (-1, indexer.pool)).amax(-1)
    return _largest(scores, wave.units[:, None], most)


def _scores(layer: StoredLayer, call: CallSequences, wave: _ScoredRows, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scores of all index keys, float32 [n, lists, keys]; any number behind those that a row sees."""
    indexer, index = layer.shape.indexer, layer.index
    assert indexer is not None and index is not None, "expected index keys"
    q, weights = by.split([indexer.heads * indexer.dim, by.shape[1] - indexer.heads * indexer.dim], 1)
    queries, weights = q.unflatten(1, (indexer.heads, indexer.dim)).to(dtype), weights.float()[:, None]
    lists = indexer.heads if indexer.local else 1
    room = torch.empty(len(by) * wave.chunks + 1, lists, torch_reads.CHUNK, device=call.device)
    of_chunk = torch.arange(torch_reads.CHUNK, dtype=torch.int32, device=call.device)
    for begin in range(0, len(wave.queries), wave.group):
        own = slice(begin, begin + wave.group)
        of_item, numbers = wave.queries[own], torch.minimum(wave.begins[own] + of_chunk, wave.lasts[own])
        sequences = call.on_device.sequences.index_select(0, wave.rows.index_select(0, of_item))[:, None]
        places = _unit_places(call, sequences, numbers, layer.shape.key_tokens, layer.block_keys)
        keys = index.read(places.flatten(), dtype).view(*numbers.shape, indexer.dim)
        scores = product(queries.index_select(0, of_item), keys.transpose(1, 2))
        if not indexer.local:
            scores = torch.bmm(weights.index_select(0, of_item), scores.relu_())
        room.index_copy_(0, wave.slots[own], scores)
    by_row: Tensor = room[:-1].unflatten(0, (len(by), wave.chunks)).transpose(1, 2).flatten(2)
    return by_row


def _largest(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return which of the first `seen` scores are the largest, ascending, int32 [..., count]; of equal the first."""
    bits = (scores + 0.0).view(torch.int32)  # which turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    index = torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered << 32) | (_LOW - index)
    keys.masked_fill_(index >= seen, torch.iinfo(torch.int64).min)
    largest = keys.topk(count, sorted=False).values
    return (_LOW - (largest & _LOW)).sort(-1).values.int()


def _places(layer: StoredLayer, call: CallSequences, sight: _Sight, units: Tensor) -> Tensor:
    """Return the places of what rows attend to, int32 [rows, lists, most], for units [rows, lists, chosen]."""
    rate, stride = layer.shape.compress_rate, layer.block_rows
    numbers = call.kept(
        ("numbers", layer.shape.indexer, rate, layer.shape.window),
        lambda: [x[:, None, None] for x in to_device([sight.chosen * sight.each, sight.tail], call.device)],
    )
    of_units, tail = numbers
    sequences, positions = (x[:, None, None] for x in call.on_device[:2])
    at = torch.arange(int(sight.counts.max(initial=1)), dtype=torch.int32, device=call.device)
    among = (at // sight.each).clamp_max(units.shape[-1] - 1).expand(*units.shape[:2], -1)
    unit, in_units = units.gather(2, among.long()), at < of_units
    token = torch.where(in_units, unit * sight.each + at % sight.each, tail + at - of_units)
    token = torch.minimum(token, positions)
    places = _unit_places(call, sequences, token, 1, stride)
    if not rate:
        return places
    entries = _unit_places(call, sequences, torch.minimum(unit, positions // rate), rate, stride, call.block_tokens)
    return torch.where(in_units, entries, places)


def _unit_places(
    call: CallSequences, sequences: Tensor, units: Tensor, tokens: int, stride: int, first: int = 0
) -> Tensor:
    """Return the places of units of so many tokens, int32 as `units`; other arguments of `CallSequences.completed`."""
    blocks, width = call.on_device.blocks, call.rows.blocks.shape[1]
    block = torch.clamp_max(((units + 1) * tokens - 1) // call.block_tokens, width - 1)
    ids = blocks.index_select(0, (sequences * width + block).flatten()).view_as(units)
    return ids * stride + first + units - block * call.block_tokens // tokens
