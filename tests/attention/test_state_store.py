"""Recurrent states: exact to rounding, the same bits however tokens come, and no more memory than open slots need."""

import math
import re

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hpcdecode import _attn_cpu
from hpcdecode._attn_cpu import KvCache, StateStore, state_bytes
from hpcdecode.attention.cpu_states import native_recurrent, reserved_bytes
from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token, state_tokens_for
from hpcdecode.bench.stateful_layers import exact, random_numbers, random_rows
from tests.support.mappings import resident
from tests.support.recurrent_cases import DTYPES, LAYERS, open_store, step, take


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name, dtype, isa):
    layer, weights, rows = LAYERS[name], random_numbers(LAYERS[name]), random_rows(LAYERS[name], 70, dtype)
    store = open_store([layer], [weights], dtype)
    assert store.isa == isa
    out = torch.cat([step(store, layer, [3], [part])[0] for part in rows.split([64, 1, 5])])
    expected = exact(layer, weights, rows)
    tolerance = (2e-5 if dtype == torch.float32 else 2**-8) * expected.abs().max()
    assert rows.shape[1] == native_recurrent([layer])[0].row_columns(DTYPES[dtype])
    assert (out.double() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_states_are_rounded_after_every_token(name, isa):
    layer, weights = LAYERS[name], random_numbers(LAYERS[name])
    narrow, rows = replace(layer, state_dtype="bfloat16"), random_rows(LAYERS[name], 70, torch.float32)
    store = open_store([narrow], [weights], torch.float32)
    out = torch.cat([step(store, narrow, [3], [part])[0] for part in rows.split([64, 1, 5])])
    expected, unrounded = exact(narrow, weights, rows), exact(layer, weights, rows)
    rounding = (expected - unrounded).abs().max()
    assert (rounding > 0) == (layer.k_dim > 0)
    assert (out.double() - expected).abs().max() <= rounding / 4 + 2e-5 * expected.abs().max()
    window = layer.channels * layer.taps * 4 if layer.taps > 1 else 0
    wide = reserved_bytes([layer]) - window
    assert reserved_bytes([narrow]) - window <= wide / 2 + 2 * 4096


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_what_a_fast_head_forgets_is_zero_and_no_denormal(state_dtype, isa):
    """Products that are denormals take some 100 cycles. Only recurrences flush them, not what else the thread does."""
    layer = RecurrentShape(2, 1, 16, 16, state_dtype=state_dtype)
    store = open_store([layer], [random_numbers(layer)._replace(skip=None)], torch.float32)
    rows = torch.zeros(4, 16 + 16 + 32 + 2)
    rows[:, :16], rows[0, 16:64] = 1e20, 1.0  # q; k and v of the first token, which alone is written
    rows[1:, 64], rows[1:, 65] = -30.0, -1.0  # log decays of both heads
    out = torch.cat([step(store, layer, [0], [rows[i : i + 1]])[0] for i in range(4)])
    assert (out[:3] > 0).all() and (out[3, 16:] > 0).all()
    assert (out[3, :16] == 0).all()  # exp(-90) is 8e-40
    assert (torch.full((64,), 1e-39) * 0.5 > 0).all()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_chunks_threads_or_company(name, state_dtype, isa):
    layer, weights = replace(LAYERS[name], state_dtype=state_dtype), random_numbers(LAYERS[name])
    rows = [random_rows(layer, n, torch.bfloat16, seed=n) for n in (90, 41, 1)]
    whole = [step(open_store([layer], [weights], torch.bfloat16), layer, [0], [r])[0] for r in rows]
    for threads, nodes, cut in ((1, (), 1), (2, (), 7), (3, (), 33), (4, (5, 2, 5, 2), 1)):
        store, parts = open_store([layer], [weights], torch.bfloat16, threads=threads, nodes=nodes), [[], [], []]
        for start in range(0, 90, cut):
            live = [i for i in (2, 0, 1) if start < len(rows[i])]
            for i, out in zip(
                live, step(store, layer, live, [rows[i][start : start + cut] for i in live]), strict=True
            ):
                parts[i].append(out)
        for i in range(3):
            assert torch.equal(torch.cat(parts[i]), whole[i]), f"{threads} threads, {nodes}, {cut} tokens, sequence {i}"
        store.check()


def test_layers_have_states_of_their_own(isa):
    layers = [LAYERS[n] for n in ("mamba2", "short_convolution", "odd_delta", "mamba1")]
    weights = [random_numbers(layer, seed) for seed, layer in enumerate(layers)]
    store = open_store(layers, weights, torch.float32, threads=2)
    rows = [random_rows(layer, 9, torch.float32) for layer in layers]
    for first, last in ((0, 3), (3, 4), (4, 9)):
        store.extend([5], [last - first])
        for i in (2, 0, 3, 1):
            alone = open_store([layers[i]], [weights[i]], torch.float32)
            want = step(alone, layers[i], [0], [rows[i][:last]])[0][first:]
            assert torch.equal(take(store, layers[i], [5], [rows[i][first:last]], i)[0], want)


def test_strided_rows_and_output():
    layer, weights = LAYERS["gated_delta_net"], random_numbers(LAYERS["gated_delta_net"])
    rows = random_rows(layer, 5, torch.bfloat16)
    wide = torch.cat([rows, rows.new_zeros(5, 3)], 1)
    out = torch.zeros(5, 1024 + 7).bfloat16()
    store = open_store([layer], [weights], torch.bfloat16)
    store.extend([0], [5])
    store.run(0, [0], [5], wide[:, : rows.shape[1]], out[:, 7:])
    assert torch.equal(out[:, 7:], step(store, layer, [1], [rows])[0])
    assert not out[:, :7].any()


def test_a_fork_goes_its_own_way():
    layer, weights = LAYERS["kda"], random_numbers(LAYERS["kda"])
    rows, other = random_rows(layer, 12, torch.float32), random_rows(layer, 12, torch.float32, seed=5)
    store = open_store([layer], [weights], torch.float32, threads=2)
    step(store, layer, [0], [rows[:7]])
    store.fork(0, 4)
    assert (store.length(4), store.open_slots) == (7, 2)
    own, forked = step(store, layer, [0, 4], [rows[7:], other[7:]])
    store.check()
    fresh = open_store([layer], [weights], torch.float32)
    assert torch.equal(own, step(fresh, layer, [0], [rows])[0][7:])
    assert torch.equal(forked, step(fresh, layer, [1], [torch.cat([rows[:7], other[7:]])])[0][7:])


def test_memory_follows_open_slots():
    layer, huge_page = RecurrentShape(64, 64, 128, 128, 4, has_beta=True), 2 << 20
    store = open_store([layer] * 2, [random_numbers(layer)] * 2, torch.float32, max_sequences=40)
    assert (
        store.state_bytes
        == state_bytes(native_recurrent([layer] * 2), "float32", "float32", "", 0)
        >= 2 * layer.state_bytes
    )
    assert store.state_bytes % 4096 == 0
    rows = random_rows(layer, 1, torch.float32)
    before = resident()

    held: set[int] = set()
    for slots in ([3], [3, 0, 7, 9, 30], [3, 9], [3, 9, 1, 2, 4, 5], []):
        store.release(sorted(held.difference(slots)))
        store.extend(slots, [1] * len(slots))
        for i in range(2 if slots else 0):
            take(store, layer, slots, [rows] * len(slots), i)
        held, extra = set(slots), resident() - before
        assert store.open_slots == len(slots)
        assert len(slots) * store.state_bytes <= extra + huge_page
        assert extra <= len(slots) * store.state_bytes + 4 * huge_page


def test_a_slot_begins_with_zeros_again():
    layer, weights = LAYERS["gated_delta_net"], random_numbers(LAYERS["gated_delta_net"])
    rows = random_rows(layer, 6, torch.float32)
    store = open_store([layer], [weights], torch.float32, max_sequences=2)
    first = step(store, layer, [1], [rows])[0]
    store.release([1])
    with pytest.raises(ValueError, match="slot 1 is not open"):
        store.length(1)
    assert torch.equal(first, step(store, layer, [1], [rows])[0])


def test_counters():
    layer = LAYERS["mamba2"]
    store = open_store([layer], [random_numbers(layer)], torch.bfloat16)
    step(store, layer, [0, 1], [random_rows(layer, 1, torch.bfloat16), random_rows(layer, 9, torch.bfloat16)])
    state, row = 4 * 24 * 128 * 64, 2 * layer.channels
    assert store.bytes_moved == 2 * 2 * state + row * (3 + 1) + row * (3 + 3)
    assert store.run_seconds > 0 and store.rewrite_seconds() > 0 and store.threads == 1


def test_beside_a_kv_cache():
    shape = _attn_cpu.LayerShape(1, 8, 8, 1, 1.0, None, None, False)
    cache = KvCache([shape], "float32", 64, 2, 16, 3, [], "", [], False)
    layer, weights = LAYERS["mamba2"], random_numbers(LAYERS["mamba2"])
    store = StateStore(native_recurrent([layer]), [weights], "float32", "float32", 2, 1, [], "", [], False, cache, 0)
    assert store.threads == 3
    rows = random_rows(layer, 40, torch.float32)
    assert torch.equal(
        step(store, layer, [0], [rows])[0], step(open_store([layer], [weights], torch.float32), layer, [0], [rows])[0]
    )


SMALL = RecurrentShape(4, 2, 8, 4, 3, has_beta=True)
COLUMNS = native_recurrent([SMALL])[0].row_columns("float32")


@pytest.fixture
def small():
    store = open_store([SMALL], [random_numbers(SMALL)], torch.float32, max_sequences=4)
    store.extend([1], [3])
    return store


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer": 1}, "layer 1 is out of range"),
        ({"slots": [2]}, "slot 2 is not open"),
        ({"slots": [4]}, "slot 4 is out of range"),
        ({"slots": [1, 1], "counts": [1, 2]}, "given twice"),
        ({"counts": [2]}, "layer 0 has seen 0 of 3 tokens, so count 2 does not fit"),
        ({"counts": [-1]}, "count -1 does not fit"),
        ({"counts": [1, 2]}, "same length"),
        ({"rows": torch.zeros(3, COLUMNS + 1)}, "rows: expected shape"),
        ({"rows": torch.zeros(3, COLUMNS).bfloat16()}, "rows and out: expected float32"),
        ({"out": torch.zeros(2, 16)}, "out: expected shape"),
        ({"out": torch.zeros(3, 16).bfloat16()}, "rows and out: expected float32"),
    ],
)
def test_bad_run(small, change, message):
    given = {"layer": 0, "slots": [1], "counts": [3], "rows": torch.zeros(3, COLUMNS), "out": torch.zeros(3, 16)}
    with pytest.raises(ValueError, match=message):
        small.run(*(given | change).values())
    small.run(*given.values())
    with pytest.raises(ValueError, match="has seen 3 of 3"):
        small.run(*given.values())


def test_bad_slots(small):
    for call, message in (
        (lambda: small.extend([0, 9], [1, 1]), "slot 9 is out of range"),
        (lambda: small.extend([0], [-1]), "count -1 of slot 0 is negative"),
        (lambda: small.release([1, 0]), "slot 0 is not open"),
        (lambda: small.fork(0, 2), "slot 0 is not open"),
        (lambda: small.fork(1, 1), "given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="slots: expected int32"):
        small.extend(np.array([1]), [1])
    assert (small.length(1), small.open_slots) == (3, 1)
    small.fork(1, 2)
    with pytest.raises(ValueError, match="slot 2 is open"):
        small.fork(1, 2)
    small.check()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 3}, "heads: expected a multiple of k_heads 2"),
        ({"v_dim": 0}, "v_dim: expected 1 to"),
        ({"taps": 65}, "taps: expected 0 to 64"),
        ({"taps": 0, "silu": True}, "silu: expected False"),
        ({"k_dim": 0}, "k_dim 0: expected no delta"),
        ({"decay_dim": 2}, "decay_dim: expected 1 or k_dim 8"),
        ({"has_beta": False, "has_rate": True}, "has_rate: expected has_beta"),
        ({"scale": math.inf}, "scale: expected a finite number"),
    ],
)
def test_bad_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        native_recurrent([replace(SMALL, **change)])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"convolution": None}, ValueError, "layer 0: conv_weight: expected 144 values, got 0"),
        ({"convolution": torch.zeros(3, 48)}, ValueError, "conv_weight: expected shape [48, 3]"),
        ({"convolution": torch.zeros(48, 3).bfloat16()}, TypeError, "conv_weight: expected float32"),
        ({"bias": torch.zeros(4)}, ValueError, "layer 0: conv_bias: expected 48 values, got 4"),
        ({"rate": torch.zeros(4)}, ValueError, "layer 0: rate: expected 0 values, got 4"),
        ({"skip": torch.zeros(4).double()}, TypeError, "skip: expected float32"),
    ],
)
def test_bad_weights(change, error, message):
    weights = RecurrentWeights(torch.zeros(48, 3), None, None, None)._replace(**change)
    with pytest.raises(error, match=re.escape(message)):
        open_store([SMALL], [weights], torch.float32)


def test_bad_stores():
    with pytest.raises(ValueError, match="max_sequences: expected at least 1"):
        open_store([SMALL], [random_numbers(SMALL)], torch.float32, max_sequences=0)
    with pytest.raises(ValueError, match="weights: expected those of 1 layers, got 0"):
        open_store([SMALL], [], torch.float32)
    with pytest.raises(ValueError, match="layers: expected at least one"):
        open_store([], [], torch.float32)
    for dtypes in (("float16", "float32"), ("float32", "float16")):
        with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16"):
            StateStore(native_recurrent([SMALL]), [random_numbers(SMALL)], *dtypes, 1, 1, [], "", [], False, None, 0)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "k8v4"])
@pytest.mark.parametrize("dim", [8, 60, 64, 128])
def test_the_tokens_of_a_state_are_enough_for_it_and_no_more(dim, kv_dtype):
    """In whole blocks, also where the state is but a little larger than some blocks."""
    states = [RecurrentShape(4, 2, 16, 24, 4, has_beta=True)] * 3
    for heads in range(1, 7):
        layers = [LayerShape(heads, dim, dim, heads, 1.0), *states]
        block = bytes_per_token(layers, kv_dtype, 64) * 64
        tokens, reserved = state_tokens_for(layers, kv_dtype, 64), reserved_bytes(states)
        assert tokens % 64 == 0 and 0 <= tokens // 64 * block - reserved < block
