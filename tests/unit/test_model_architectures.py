"""Slices around a plain attention give transformers' logits, for every architecture."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from tests.models import ARCHITECTURES, build

from hpcdecode.model import AttendSpec, SplitModel, load_split

SEQUENCES = (150, 37, 1)  # tokens; the first is longer than the windows


class Attention:
    """Plain float32 attention that keeps K and V per sequence and layer."""

    def __init__(self, model: SplitModel):
        self.model = model
        self.held: dict = defaultdict(lambda: (None, None))

    def __call__(self, spec: AttendSpec, rows: list[int], positions: torch.Tensor, q, k, v) -> torch.Tensor:
        out = torch.empty(len(rows), spec.o_width, dtype=q.dtype)
        rows = torch.tensor(rows)
        for row in rows.unique().tolist():
            at = (rows == row).nonzero()[:, 0]
            keys, values = self.append(spec, row, k[at], v[at])
            out[at] = self.attend(spec, q[at].float(), keys, values, positions[at]).to(q.dtype)
        return out

    def append(self, spec, row, k, v):
        old_k, old_v = self.held[spec.layer, row]
        new = (k, v) if old_k is None else (torch.cat([old_k, k]), torch.cat([old_v, v]))
        self.held[spec.layer, row] = new
        return new

    def attend(self, spec, q, keys, values, positions):
        share = spec.q_heads // spec.kv_heads
        k = keys.float().view(-1, spec.kv_heads, spec.k_dim).repeat_interleave(share, 1)
        v = values.float().view(-1, spec.kv_heads, spec.v_dim).repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q.view(-1, spec.q_heads, spec.k_dim), k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        back = positions[:, None] - torch.arange(len(k))
        scores = scores.masked_fill((back < 0) | (back >= (spec.window or 1 << 30)), -torch.inf)
        sinks = self.model.sinks(spec.layer)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), spec.o_width)


def step(model: SplitModel, attention: Attention, tokens: list[tuple[int, int, int]], keep: list[int]) -> torch.Tensor:
    """Run (row, position, token id) triples through all slices; logits of the kept ones."""
    rows, positions, ids = ([t[i] for t in tokens] for i in range(3))
    ids, positions = torch.tensor(ids), torch.tensor(positions)
    ctx, o = (ids, positions, torch.tensor(keep, dtype=torch.int64)), None
    for i, spec in enumerate(model.attends):
        q, k, v, ctx = model.slice(i, o, ctx)
        assert q.shape == (len(rows), spec.q_width) and k.shape == (len(rows), spec.k_width)
        assert v.shape == (len(rows), spec.v_width) and q.dtype == k.dtype == v.dtype == model.dtype
        o = attention(spec, rows, positions, q, k, v)
    return model.logits(o, ctx)


def schedule() -> list[list[tuple[int, int]]]:
    """(row, position) batches: chunked prefill, prefill that joins decoding, tokens of rows interleaved, T = 1."""
    a, b, c = SEQUENCES
    first = [(0, p) for p in range(0, 90)]
    second = [(0, p) for p in range(90, a - 3)] + [(1, p) for p in range(b - 3)] + [(2, 0)]
    third = [(1, b - 3), (0, a - 3)]
    return [first, second, third, [(0, a - 2), (1, b - 2)], [(1, b - 1)], [(0, a - 1)]]


def reference_logits(path, ids: list[list[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([row]), use_cache=False).logits[0] for row in ids]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers(name, tmp_path):
    path = build(name, tmp_path)
    model, generator = load_split(path, dtype="float32"), torch.Generator().manual_seed(1)
    ids = [torch.randint(2, model.vocab_size, (n,), generator=generator).tolist() for n in SEQUENCES]
    expected, attention = reference_logits(path, ids), Attention(model)
    worst, same = 0.0, []
    for batch in schedule():
        got = step(model, attention, [(r, p, ids[r][p]) for r, p in batch], list(range(len(batch))))
        want = torch.stack([expected[r][p] for r, p in batch])
        worst = max(worst, (got - want).abs().max().item())
        same.append(torch.equal(got.argmax(-1), want.argmax(-1)))
    print(f"{name}: max logit error {worst:.1e}, groups {[g.slices for g in model.parts.groups]}")
    assert worst < 1e-4 and all(same)
    assert want.std() > 0.1
