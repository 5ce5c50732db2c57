"""Steps of a split model over plain attention."""

from __future__ import annotations

from collections import defaultdict

import torch

from hpcdecode.attention.plain import attend_rows, chosen_positions
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.states import ReferenceStateStore
from hpcdecode.model import SplitModel


class Attention:
    """Plain float32 attention that keeps K and V per sequence and layer, and the states of layers that have some."""

    def __init__(self, model: SplitModel):
        self.model = model
        self.held: dict = defaultdict(lambda: (None, None))
        self.chosen: dict = {}
        self.states = {
            i: ReferenceStateStore([shape], [model.recurrent_weights(i)], 1 << 20)
            for i, shape in enumerate(model.attends)
            if isinstance(shape, RecurrentShape)
        }

    def __call__(self, layer: int, rows: list[int], positions: torch.Tensor, q, k=None, v=None, *more) -> torch.Tensor:
        shape = self.model.attends[layer]
        out = torch.empty(len(rows), shape.out_columns, dtype=q.dtype)
        rows = torch.tensor(rows)
        for row in rows.unique().tolist():
            at = (rows == row).nonzero()[:, 0]
            if layer in self.states:
                whole = torch.cat([x for x in (q, k, v, *more) if x is not None], 1)[at]
                self.states[layer].extend([row], [len(at)])
                result = torch.empty(len(at), shape.out_columns, dtype=q.dtype)
                self.states[layer].run(0, [row], [len(at)], whole, result)
                out[at] = result
                continue
            keys, values = self.append(layer, row, k[at], v[at])
            if shape.chooses_from is not None or shape.q_columns > shape.own_q_columns:
                held = torch.cat([keys, values], 1)
                out[at] = self.attend_all_columns(layer, row, q[at], held).to(q.dtype)
                continue
            out[at] = self.attend(layer, q[at].float(), keys, values, positions[at]).to(q.dtype)
        return out

    def attend_all_columns(self, layer, row, q, held):
        shape, chosen = self.model.attends[layer], None
        held, by = held.float(), q[:, shape.own_q_columns :].float()
        if shape.indexer and not shape.compress_rate:
            if shape.indexer.heads:
                self.chosen[row] = chosen_positions(by, held[:, shape.own_k_columns : shape.k_columns], shape.indexer)
            chosen = self.chosen[row]
        heads = q[:, : shape.own_q_columns].float().unflatten(1, (shape.q_heads, -1))
        return attend_rows(heads, held, by, shape, self.model.sinks(layer), chosen).flatten(1)

    def append(self, layer, row, k, v):
        old_k, old_v = self.held[layer, row]
        new = (k, v) if old_k is None else (torch.cat([old_k, k]), torch.cat([old_v, v]))
        self.held[layer, row] = new
        return new

    def attend(self, layer, q, keys, values, positions):
        shape = self.model.attends[layer]
        k = keys.float().view(-1, shape.kv_heads, shape.k_dim).repeat_interleave(shape.group, 1)
        v = k[..., : shape.v_dim] if shape.latent else values.float().view(len(values), shape.kv_heads, shape.v_dim)
        v = v if shape.latent else v.repeat_interleave(shape.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.view(-1, shape.q_heads, shape.k_dim), k) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        query, key, most = positions[:, None], torch.arange(len(k)), shape.window or 1 << 30
        hidden = query // most != key // most if shape.chunked else query - key >= most
        scores = scores.masked_fill((query < key) | hidden, -torch.inf)
        sinks = self.model.sinks(layer)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), shape.out_columns)


def step(model: SplitModel, attention: Attention, tokens: list[tuple[int, int, int]], keep: list[int]) -> torch.Tensor:
    """Run (row, position, token id) triples through all slices; logits of the kept ones."""
    rows, positions, ids = ([t[i] for t in tokens] for i in range(3))
    ids, positions = torch.tensor(ids), torch.tensor(positions)
    ctx, o = (ids, positions, torch.tensor(keep, dtype=torch.int64)), None
    for i, shape in enumerate(model.attends):
        parts, ctx = model.slice(i, o, ctx)
        assert sum(x.shape[1] for x in parts) == shape.row_columns
        assert all(len(x) == len(rows) and x.dtype == model.dtype for x in parts)
        o = attention(i, rows, positions, *parts)
    return model.logits(o, ctx)
