"""What a decode step reads of a sequence, against sums over layers and steps one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdecode.attention.reach import ALL_TOKENS, Reach, reach_of
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import IndexerShape, LayerShape

FULL = LayerShape(kv_heads=2, k_dim=8, v_dim=8, q_heads=4, scale=1.0)  # 32 elements of K and V
NARROW = LayerShape(kv_heads=1, k_dim=8, v_dim=8, q_heads=4, scale=1.0)


def windowed(most, shape=FULL, chunked=False):
    return LayerShape(shape.kv_heads, shape.k_dim, shape.v_dim, shape.q_heads, 1.0, window=most, chunked=chunked)


@given(
    st.lists(st.tuples(st.sampled_from([1, 5, 64, 300]), st.integers(1, 4)), max_size=3),
    st.integers(1, 400),
    st.integers(-2, 300),
    st.integers(0, 100),
)
def test_sums_are_those_of_single_steps(windows, first, steps, state):
    reach = Reach(0.5, tuple((count / 8, most) for most, count in windows), float(state))
    last = first + steps - 1
    each = [0.5 * n + sum(count / 8 * min(n, most) for most, count in windows) + state for n in range(first, last + 1)]
    assert reach.over(first, last) == pytest.approx(sum(each))
    both = reach.over(np.array([first, first]), np.array([last, first - 1]))
    assert both == pytest.approx([sum(each), 0])


def test_layers_count_by_what_they_read():
    assert reach_of([FULL, NARROW]) == ALL_TOKENS
    assert reach_of([FULL, windowed(64), windowed(64), windowed(512, NARROW)]) == Reach(
        2 / 7, ((4 / 7, 64), (1 / 7, 512))
    )
    assert reach_of([windowed(64, chunked=True)]) == Reach(0.0, ((1.0, 32),))
    state = RecurrentShape(heads=2, k_heads=2, k_dim=4, v_dim=4, taps=4)
    assert reach_of([state, FULL], 7.0) == Reach(state=7.0) and reach_of([state], 7.0) == Reach(state=7.0)


def test_indexers_read_their_keys_of_all_tokens():
    chosen = LayerShape(1, 576, 512, 128, 1.0, latent=True, indexer=IndexerShape(2048, heads=64, dim=128))
    same = LayerShape(1, 576, 512, 128, 1.0, latent=True, indexer=IndexerShape(2048))  # as the layer before it chose
    kv, scores = 128 * 1088, 64 * 129
    found = reach_of([chosen, same])
    assert found.whole == pytest.approx(scores / (2 * kv + scores))
    assert found.windows == ((pytest.approx(2 * kv / (2 * kv + scores)), 2048),)


def test_compressed_entries_stand_for_several_tokens():
    heavy = LayerShape(1, 64, 64, 8, 1.0, window=128, latent=True, compress_rate=128)
    assert reach_of([heavy]) == Reach(pytest.approx(1 / 129), ((pytest.approx(128 / 129), 128),))
    sparse = LayerShape(
        1, 64, 64, 8, 1.0, window=128, latent=True, compress_rate=4, indexer=IndexerShape(512, heads=2, dim=15)
    )
    kv, entries, scores = 8 * 128, 8 * 128 / 4, 2 * 16 / 4
    found, total = reach_of([sparse]), kv + entries + scores
    assert found.whole == pytest.approx(scores / total)
    assert found.windows == ((pytest.approx(kv / total), 128), (pytest.approx(entries / total), 2048))
