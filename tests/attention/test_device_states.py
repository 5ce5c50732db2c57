"""The store of recurrent states of a GPU, by kernels, emulated here, and by torch's operations.

Both are compared with float64 and the store of CPUs, and a sequence alone with the same one in company.
"""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.base import KvCapacityError
from hpcdecode.attention.cuda import serves_states
from hpcdecode.attention.device_states import DeviceStateStore
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.bench.stateful_layers import exact, random_numbers, random_rows
from tests.support.recurrent_cases import LAYERS, open_store, step, take
from tests.support.told import Told

SIZES = {  # that the kernels cut in other ways
    "large_head": RecurrentShape(2, 1, 200, 160, 4, True, True, True, 0.1, 1, True),
    "narrow_rows": RecurrentShape(4, 2, 40, 12, 2, True, False, True, 0.4, 40, True, True),
    "one_tap": RecurrentShape(2, 2, 16, 8, 1, True, has_beta=True),
    "long_lanes": RecurrentShape(130, 1, 50, 1, 4, True, decay_dim=50, has_beta=True),
}
EVERY = LAYERS | SIZES
WAYS = [(name, True) for name in EVERY if serves_states(EVERY[name])] + [(name, False) for name in EVERY]
ways = pytest.mark.parametrize("name, by_kernels", WAYS)


def wide(layer: RecurrentShape, dtype: torch.dtype, state_dtype: str = "float32") -> RecurrentShape:
    return replace(layer, element_bytes=dtype.itemsize, state_dtype=state_dtype)


def opened(
    layer: RecurrentShape, dtype: torch.dtype, state_dtype: str = "float32", states: int = 8, by_kernels: bool = True
) -> DeviceStateStore:
    own = wide(layer, dtype, state_dtype)
    return DeviceStateStore([own], [random_numbers(layer)], 8, states, by_kernels=by_kernels)


def test_kernels_serve_known_layers():
    served = {name for name in EVERY if serves_states(EVERY[name])}
    assert served == EVERY.keys() - {"odd_delta", "compressor", "overlapping_compressor"}
    assert not serves_states(LAYERS["kda"], "meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ways
def test_against_float64(name, by_kernels, dtype):
    layer, rows = EVERY[name], random_rows(EVERY[name], 45, dtype)
    store = opened(layer, dtype, by_kernels=by_kernels)
    out = torch.cat([step(store, layer, [3], [part])[0] for part in rows.split([35, 1, 9])])
    expected = exact(layer, random_numbers(layer), rows)
    tolerance = (2e-5 if dtype == torch.float32 else 2**-8) * expected.abs().max()
    assert (out.double() - expected).abs().max() <= tolerance
    store.check()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@ways
def test_equals_the_store_of_cpus(name, by_kernels, state_dtype):
    """With states rounded to bfloat16 after every token a near tie may fall either way."""
    layer = replace(EVERY[name], state_dtype=state_dtype)
    rows = [random_rows(layer, n, torch.float32, seed=n) for n in (12, 3)]
    stores = (
        open_store([layer], [random_numbers(layer)], torch.float32),
        opened(layer, torch.float32, state_dtype, by_kernels=by_kernels),
    )
    ours, theirs = (torch.cat(step(store, layer, [2, 5], rows)) for store in stores)
    tolerance = 2e-5 if state_dtype == "float32" else 1e-2
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@ways
def test_bits_do_not_depend_on_chunks_or_company(name, by_kernels, state_dtype, monkeypatch):
    def fresh():
        return opened(layer, torch.bfloat16, state_dtype, by_kernels=by_kernels)

    layer = EVERY[name]
    rows = [random_rows(layer, n, torch.bfloat16, seed=n) for n in (16, 9, 1)]
    whole = [step(fresh(), layer, [0], [r])[0] for r in rows]
    for cut, most in ((1, 8), (7, 1), (16, 2)):
        store, parts = fresh(), [[], [], []]
        monkeypatch.setattr(store, "_most", most)
        for start in range(0, 16, cut):
            live = [i for i in (2, 0, 1) if start < len(rows[i])]
            outs = step(store, layer, live, [rows[i][start : start + cut] for i in live])
            for i, out in zip(live, outs, strict=True):
                parts[i].append(out)
        for i in range(3):
            assert torch.equal(torch.cat(parts[i]), whole[i]), f"{cut} tokens, sequence {i}"
        store.check()


def test_layers_have_states_of_their_own():
    layers = [LAYERS[n] for n in ("mamba2", "short_convolution", "odd_delta", "mamba1")]
    weights = [random_numbers(layer, seed) for seed, layer in enumerate(layers)]
    store, rows = DeviceStateStore(layers, weights, 6, 2), [random_rows(layer, 9, torch.float32) for layer in layers]
    for first, last in ((0, 3), (3, 4), (4, 9)):
        store.extend([5], [last - first])
        for i in (2, 0, 3, 1):
            alone = DeviceStateStore([layers[i]], [weights[i]], 1, 1)
            want = step(alone, layers[i], [0], [rows[i][:last]])[0][first:]
            assert torch.equal(take(store, layers[i], [5], [rows[i][first:last]], i)[0], want)


def test_a_fork_goes_its_own_way_and_a_slot_begins_with_zeros_again():
    layer = LAYERS["kda"]
    rows, other = random_rows(layer, 12, torch.float32), random_rows(layer, 12, torch.float32, seed=5)
    store = opened(layer, torch.float32, states=2)
    step(store, layer, [0], [rows[:7]])
    store.fork(0, 4)
    assert (store.length(4), store.open_slots) == (7, 2)
    own, forked = step(store, layer, [0, 4], [rows[7:], other[7:]])
    fresh = opened(layer, torch.float32)
    assert torch.equal(own, step(fresh, layer, [0], [rows])[0][7:])
    assert torch.equal(forked, step(fresh, layer, [1], [torch.cat([rows[:7], other[7:]])])[0][7:])
    store.release([0, 4])
    assert torch.equal(step(store, layer, [7], [rows])[0][7:], own)
    store.check()


def test_strided_rows_and_output():
    layer = LAYERS["gated_delta_net"]
    rows = random_rows(layer, 5, torch.bfloat16)
    wider = torch.cat([rows, rows.new_zeros(5, 3)], 1)
    out, store = torch.zeros(5, 1024 + 7).bfloat16(), opened(layer, torch.bfloat16)
    store.extend([0], [5])
    store.run(0, [0], [5], wider[:, : rows.shape[1]], out[:, 7:])
    assert torch.equal(out[:, 7:], step(store, layer, [1], [rows])[0])
    assert not out[:, :7].any()


def test_prompts_longer_than_what_a_block_convolves():
    """The window that a sequence had is read before that of its next tokens takes its place."""
    layer = LAYERS["gated_delta_net"]
    rows, store = random_rows(layer, 150, torch.float32), opened(layer, torch.float32)
    parts = [step(store, layer, [1], [part])[0] for part in rows.split([2, 70, 1, 77])]
    assert torch.equal(torch.cat(parts), step(opened(layer, torch.float32), layer, [0], [rows])[0])


def test_a_device_is_told_what_to_do_without_a_wait():
    """Nothing is read back; while sequences stay the same nothing goes there, but the first time."""
    layers = [wide(LAYERS[name], torch.bfloat16) for name in LAYERS]
    store = DeviceStateStore(layers, [random_numbers(layer) for layer in LAYERS.values()], 4, 4, "meta")
    copies = []
    for counts in ([5, 1], [1, 1], [1, 1]):
        with Told() as told:
            store.extend([0, 2], counts)
            for i, layer in enumerate(layers):
                rows = torch.zeros(sum(counts), layer.row_columns, dtype=torch.bfloat16, device="meta")
                out = torch.zeros(sum(counts), layer.out_columns, dtype=torch.bfloat16, device="meta")
                store.run(i, [0, 2], counts, rows, out)
        copies.append(told.copies)
    with Told() as told:
        store.fork(0, 1)
    assert copies == [2, 1, 0] and told.copies == 0 and store.open_slots == 3


SMALL = RecurrentShape(4, 2, 8, 4, 3, has_beta=True)


@pytest.fixture
def small():
    store = DeviceStateStore([SMALL], [random_numbers(SMALL)], 4, 2)
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
        ({"counts": [1, 2]}, "same length"),
        ({"rows": torch.zeros(3, SMALL.row_columns + 1)}, "rows: expected shape"),
        ({"rows": torch.zeros(3, SMALL.row_columns).bfloat16()}, "rows and out: expected 4 bytes a column"),
        ({"out": torch.zeros(2, 16)}, "out: expected shape"),
    ],
)
def test_bad_run(small, change, message):
    columns = SMALL.row_columns
    given = {"layer": 0, "slots": [1], "counts": [3], "rows": torch.zeros(3, columns), "out": torch.zeros(3, 16)}
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
        (lambda: small.fork(1, 1), "slot 1 is open"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    small.fork(1, 2)
    for full in (lambda: small.fork(1, 3), lambda: small.extend([3], [1])):
        with pytest.raises(KvCapacityError, match="0 free of 2"):
            full()
    assert (small.length(1), small.open_slots) == (3, 2)
    small.check()


def test_bad_weights():
    weights = random_numbers(SMALL)
    for change in ({"convolution": torch.zeros(3, 48)}, {"convolution": None}, {"rate": torch.zeros(4)}):
        with pytest.raises(ValueError, match="expected"):
            DeviceStateStore([SMALL], [weights._replace(**change)], 1, 1)
    with pytest.raises(ValueError, match="weights: expected those of 1 layers, at least one, got 0"):
        DeviceStateStore([SMALL], [], 1, 1)
