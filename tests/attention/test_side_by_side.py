"""Prompts and decode rows of a layer in one call: the bits of calls of their own, in the output and in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.shapes import LayerShape
from tests.support.attention_cases import ints, pretend, shape

SHAPES = {
    "gqa3_64": shape(2, 64, 3),
    "gqa8_96_window": LayerShape(1, 96, 80, 8, 0.1, window=90),
    "mha_window_sinks_softcap": LayerShape(2, 40, 24, 2, 0.2, window=700, softcap=20.0, sinks=True),
    "latent": LayerShape(1, 72, 64, 20, 0.1, latent=True),
    "group160": shape(1, 8, 160),  # rows are written before any item attends
}
DECODES = (1, 70, 1300)  # tokens held before
CHUNKS = ((0, 1), (0, 90), (130, 77), (64, 300))  # start, count


@dataclass
class Layer:
    """A KV cache with sequences in it, and prompts some of whose tokens are packed.

    Attributes:
        rows: [q | k | v] of one new token of each sequence.
        prompts: [q | k | v] of the new tokens of each prompt.
    """

    shape: LayerShape
    kv_cache: CpuKvCache
    attention: CpuPromptAttention
    packed: list[torch.Tensor]
    rows: torch.Tensor
    prompts: list[torch.Tensor]
    sinks: torch.Tensor | None


def opened(s, kv_dtype, dtype, **options):
    """A layer, the same every time but for its threads and blocks."""
    draw = torch.Generator().manual_seed(2)

    def rows(n):
        return torch.randn(n, s.row_columns, generator=draw).to(dtype)

    slots, held = len(DECODES) + len(CHUNKS), [*DECODES, *(start for start, _ in CHUNKS)]
    capacity = sum(held) + sum(count for _, count in CHUNKS) + 512 * slots
    store = open_kv_cache([s], kv_dtype=kv_dtype, capacity_tokens=capacity, max_sequences=slots, **options)
    assert isinstance(store, CpuKvCache)
    attention = CpuPromptAttention([s], dtype=str(dtype).removeprefix("torch."), beside=store)
    sinks, packed = torch.randn(s.q_heads, generator=draw) if s.sinks else None, []
    for slot, tokens in enumerate(held):
        before = rows(tokens)
        store.extend(ints([slot]), ints([tokens]))
        store.append(0, ints([slot]), ints([tokens]), before[:, s.q_columns :].contiguous())
        if slot >= len(DECODES):
            memory = torch.full((attention.packed_bytes(0, 400),), 255, dtype=torch.uint8)
            out = torch.empty(tokens, s.out_columns, dtype=dtype)
            attention.attend(0, [memory], [0], [tokens], *parts(s, before), out, sinks)
            packed.append(memory)
    store.extend(ints(range(slots)), ints([1] * len(DECODES) + [count for _, count in CHUNKS]))
    return Layer(s, store, attention, packed, rows(len(DECODES)), [rows(n) for _, n in CHUNKS], sinks)


def parts(s, rows):
    """q, k and v of rows as prompt attention takes them."""
    if s.latent:
        return rows[:, : s.q_columns], rows[:, s.q_columns :], rows[:, :0]
    return rows.split([s.q_columns, s.k_columns, s.v_columns], dim=1)


def run(layer, which=None, decodes=True, together=True):
    """Output of decode rows and of prompts `which`, and the bytes of their blocks."""
    s, dtype = layer.shape, layer.rows.dtype
    which = list(range(len(CHUNKS)) if which is None else which)
    rows = torch.cat([layer.prompts[i] for i in which])
    kv, slots = rows[:, s.q_columns :].contiguous(), ints(len(DECODES) + i for i in which)
    starts, counts = (ints(CHUNKS[i][j] for i in which) for j in (0, 1))
    n = len(DECODES) if decodes else 0
    own = (ints(range(n)), ints([1] * n), layer.rows[:n])
    o = torch.full((n, s.out_columns), float("nan"), dtype=dtype)
    out = torch.full((len(rows), s.out_columns), float("nan"), dtype=dtype)
    memory = [layer.packed[i] for i in which]
    if together:
        beside = layer.kv_cache.layer_rows(0, (slots, counts, kv), (*own, o), layer.sinks)
        spent = layer.attention.attend(0, memory, starts, counts, *parts(s, rows), out, layer.sinks, None, beside)
        assert min(spent) >= 0 and spent.append > 0 and spent.prompts > 0 and (spent.attend > 0) == decodes
    else:
        layer.kv_cache.append(0, slots, counts, kv)
        layer.kv_cache.attend(0, *own, o, layer.sinks)
        layer.attention.attend(0, memory, starts, counts, *parts(s, rows), out, layer.sinks)
    layer.kv_cache.check()
    return o, list(out.split(counts.tolist())), [blocks(layer.kv_cache, slot) for slot in slots.tolist()]


def blocks(store, slot):
    """The bytes of a sequence's whole blocks."""
    whole = store.length(slot) // store.block_tokens
    data = np.zeros(whole * store.native.block_bytes, np.uint8)
    store.native.copy_out(slot, 0, data)
    return data


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_calls_of_their_own(name, kv_dtype, isa):
    s = SHAPES[name]
    if (s.latent and kv_dtype not in LATENT_KV_DTYPES) or (s.group > 128 and kv_dtype != "float32"):
        pytest.skip("refused, or as the others")
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    o, outs, stored = run(opened(s, kv_dtype, dtype, threads=1), together=False)
    assert not o.isnan().any() and not any(out.isnan().any() for out in outs)
    for options in ({"threads": 1}, {"threads": 3, "block_tokens": 24}, pretend(1, 0, 1)):
        layer = opened(s, kv_dtype, dtype, **options)
        again, others, copies = run(layer)
        assert torch.equal(o, again) and all(map(torch.equal, outs, others)), options
        if "block_tokens" not in options:
            assert all(map(np.array_equal, stored, copies)), options
    alone = opened(s, kv_dtype, dtype, threads=2)
    assert torch.equal(outs[3], run(alone, which=[3], decodes=False)[1][0]), "a prompt alone"


def test_bad_rows_are_named():
    s = SHAPES["gqa3_64"]
    layer = opened(s, "float32", torch.float32, threads=2)
    other = open_kv_cache([s], kv_dtype="float32", capacity_tokens=64, max_sequences=1, threads=2)
    q, k, v = parts(s, layer.prompts[0])
    kv = layer.prompts[0][:, s.q_columns :].contiguous()
    none, o = ints([]), torch.empty(1, s.out_columns)
    good = layer.kv_cache.layer_rows(0, (ints([3]), ints([1]), kv), (ints([0]), ints([1]), layer.rows[:1], o), None)

    def attend(beside):
        out = torch.empty(1, s.out_columns)
        return layer.attention.attend(0, layer.packed[:1], [0], [1], q, k, v, out, None, None, beside)

    assert attend(good).append > 0
    assert attend(good._replace(prompt_slots=none, prompt_counts=none, kv=kv[:0])).append == 0
    for change, message in (
        ({"kv_cache": other.native}, "beside: expected the KV cache whose threads prompts use"),
        ({"layer": 1}, "layer 1 is out of range: expected 0 to 0"),
        ({"slots": ints([3])}, "slot 3"),
        ({"slots": ints([99])}, "slot 99"),
        ({"kv": kv[:, 1:]}, "kv: expected shape"),
        ({"qkv": kv}, "qkv: expected shape"),
        ({"sinks": torch.ones(6)}, "sinks: this layer was opened without"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(good._replace(**change))
    with pytest.raises(ValueError, match="beside: expected 10 fields, got 9"):
        attend(tuple(good)[:-1])


def test_traced_items_are_all_and_in_order():
    """Packs first; then the longer of the next items; each with what it took."""
    layer = opened(SHAPES["gqa3_64"], "bfloat16", torch.bfloat16, threads=16)
    whole = run(opened(SHAPES["gqa3_64"], "bfloat16", torch.bfloat16, threads=1))
    layer.attention.native.traces = True
    o, outs, _ = run(layer)
    assert torch.equal(o, whole[0]) and all(map(torch.equal, outs, whole[1]))
    kinds, groups, tokens, _, seconds = zip(*layer.attention.native.items, strict=True)
    assert set(kinds) == {"pack", "attend", "append", "prompt"} and min(seconds) > 0
    assert kinds[: kinds.count("pack")] == ("pack",) * kinds.count("pack")
    assert len({*zip(kinds, groups, tokens, strict=True)}) == len(kinds)
    heads = SHAPES["gqa3_64"].kv_heads
    for kind, step in (("pack", 128), ("prompt", 32)):
        at = {(g // heads, t) for k, g, t in zip(kinds, groups, tokens, strict=True) if k == kind}
        assert {i for i, _ in at} == set(range(len(CHUNKS)))
        assert len(at) >= sum(-(-count // step) for _, count in CHUNKS)
    estimates = [e for k, _, _, e, _ in layer.attention.native.items if k == "attend"]
    assert max(estimates) >= estimates[-1]
