"""States of sequences whose last tokens were wrong guesses: the bits of sequences that never had them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.cuda import serves_states
from hpcdecode.attention.device_states import DeviceStateStore
from hpcdecode.attention.states import ReferenceStateStore
from hpcdecode.bench.stateful_layers import random_numbers, random_rows
from tests.support.recurrent_cases import LAYERS, open_store, step, take

AHEAD = 5
LENGTHS = (90, 41, 66)


def of_devices(layers, weights, dtype, by_kernels):
    wide = [replace(layer, element_bytes=dtype.itemsize) for layer in layers]
    return DeviceStateStore(wide, weights, 8, 6, by_kernels=by_kernels)


WAYS = {
    "one thread": lambda *of: open_store(*of),
    "threads": lambda *of: open_store(*of, threads=3),
    "nodes": lambda *of: open_store(*of, nodes=(5, 2, 5)),
    "kernels of GPUs": lambda *of: of_devices(*of, by_kernels=True),
    "torch": lambda *of: of_devices(*of, by_kernels=False),
    "reference": lambda layers, weights, dtype: ReferenceStateStore(
        [replace(layer, element_bytes=dtype.itemsize) for layer in layers], weights, 8
    ),
}


def guessed(store, layers, rows, draw, ahead=AHEAD, most=9):
    """Return the outputs of all rows, by layer and sequence, which come in calls that end with wrong guesses.

    Args:
        store: Store of states.
        layers: Its layers.
        rows: By layer, of each sequence, [tokens, row_columns].
        draw: Random numbers.
        ahead: Most guesses of a call.
        most: Most tokens of a call that guesses nothing.
    """
    lengths = [len(each) for each in rows[0]]
    outputs, seen = [[[] for _ in lengths] for _ in layers], [0] * len(lengths)
    while left := [i for i in draw.permutation(len(lengths)).tolist() if seen[i] < lengths[i]]:
        live = left[: draw.integers(1, len(left) + 1)]
        guess = [draw.random() < 0.7 for _ in live]
        right = [
            min(int(draw.integers(1, ahead + 2 if g else most)), lengths[i] - seen[i])
            for i, g in zip(live, guess, strict=True)
        ]
        wrong = [int(draw.integers(0, ahead + 2 - n)) if g else 0 for n, g in zip(right, guess, strict=True)]
        store.extend(live, [a + b for a, b in zip(right, wrong, strict=True)])
        for place, layer in enumerate(layers):
            given = []
            for i, n, more in zip(live, right, wrong, strict=True):
                of_sequence = rows[place][i]
                others = of_sequence[torch.as_tensor(draw.integers(0, lengths[i], more))]
                given.append(torch.cat([of_sequence[seen[i] : seen[i] + n], others]))
            for i, n, out in zip(live, right, take(store, layer, live, given, place), strict=True):
                outputs[place][i].append(out[:n])
        for i, n, more in zip(live, right, wrong, strict=True):
            seen[i] += n
            if more:
                store.truncate(i, seen[i])
        store.check()
    return [list(map(torch.cat, of_layer)) for of_layer in outputs]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_wrong_guesses_leave_no_trace(way, name, state_dtype):
    layer, weights = replace(LAYERS[name], state_dtype=state_dtype, lookahead=AHEAD), random_numbers(LAYERS[name])
    if way == "kernels of GPUs" and not serves_states(layer):
        pytest.skip("torch's operations take it")
    rows, draw = [random_rows(layer, n, torch.bfloat16, seed=n) for n in LENGTHS], np.random.default_rng(len(name))
    outputs = guessed(WAYS[way]([layer], [weights], torch.bfloat16), [layer], [rows], draw)
    plain = replace(layer, lookahead=0)
    for i, given in enumerate(rows):
        (alone,) = step(WAYS[way]([plain], [weights], torch.bfloat16), plain, [0], [given])
        assert torch.equal(outputs[0][i], alone), i


@pytest.mark.parametrize("way", ["threads", "torch"])
def test_layers_hold_tokens_of_their_own(way):
    """More tokens than an instruction set prepares together, in calls that hold as many as a longest guess has."""
    layers = [replace(LAYERS[n], lookahead=40) for n in ("mamba2", "short_convolution", "kda", "mamba1")]
    weights = [random_numbers(layer, seed) for seed, layer in enumerate(layers)]
    rows = [[random_rows(layer, n, torch.float32, seed=n) for n in (300, 170)] for layer in layers]
    store, draw = WAYS[way](layers, weights, torch.float32), np.random.default_rng(0)
    outputs = guessed(store, layers, rows, draw, 40, 50)
    for place, layer in enumerate(layers):
        for i, given in enumerate(rows[place]):
            alone = WAYS[way]([replace(layer, lookahead=0)], [weights[place]], torch.float32)
            assert torch.equal(outputs[place][i], step(alone, layer, [0], [given])[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gated_delta_net", "overlapping_compressor"])
def test_a_fork_has_what_is_held(way, name):
    """Both go on, after guesses of which some were right."""
    layer, weights = replace(LAYERS[name], lookahead=AHEAD), random_numbers(LAYERS[name])
    if way == "kernels of GPUs" and not serves_states(layer):
        pytest.skip("torch's operations take it")
    rows, other = (random_rows(layer, 20, torch.float32, seed=seed) for seed in (1, 2))
    store = WAYS[way]([layer], [weights], torch.float32)
    step(store, layer, [0], [rows[:6]])
    step(store, layer, [0], [torch.cat([rows[6:9], other[:2]])])
    store.truncate(0, 8)
    store.fork(0, 3)
    assert store.length(3) == 8
    own, forked = step(store, layer, [0, 3], [rows[8:], other[8:]])
    plain = WAYS[way]([replace(layer, lookahead=0)], [weights], torch.float32)
    both = step(plain, layer, [1, 2], [rows, torch.cat([rows[:8], other[8:]])])
    assert torch.equal(own, both[0][8:]) and torch.equal(forked, both[1][8:])


@pytest.mark.parametrize("way", ["one thread", "kernels of GPUs", "torch"])
def test_what_is_in_a_state_cannot_be_dropped(way):
    layer, weights = replace(LAYERS["mamba2"], lookahead=AHEAD), random_numbers(LAYERS["mamba2"])
    rows = random_rows(layer, 12, torch.float32)
    store = WAYS[way]([layer], [weights], torch.float32)
    step(store, layer, [4], [rows[:7]])  # more than a guess and the token before it
    with pytest.raises(ValueError, match="slot 4: cannot truncate length 7 to 6: 7 tokens are in its states"):
        store.truncate(4, 6)
    step(store, layer, [4], [rows[:6]])
    for length in (7, 14):
        with pytest.raises(
            ValueError, match=f"slot 4: cannot truncate length 13 to {length}: 8 tokens are in its states"
        ):
            store.truncate(4, length)
    store.truncate(4, 10)
    store.truncate(4, 8)
    assert store.length(4) == 8
    step(store, layer, [4], [rows[:1]])  # the first of a call is known to be right
    with pytest.raises(ValueError, match="cannot truncate length 9 to 8: 9 tokens"):
        store.truncate(4, 8)
    with pytest.raises(ValueError, match="slot 5 is not open"):
        store.truncate(5, 1)
    store.check()


def test_a_guess_moves_a_state_once():
    """It is read and written as without a guess; what is moved beside it are rows."""
    layer, weights = LAYERS["gated_delta_net"], random_numbers(LAYERS["gated_delta_net"])
    moved = []
    for ahead in (0, AHEAD):
        own = replace(layer, lookahead=ahead)
        store = open_store([own], [weights], torch.bfloat16)
        rows = random_rows(own, 3, torch.bfloat16)
        for _ in range(2):
            before = store.bytes_moved
            step(store, own, [0], [rows if ahead else rows[:1]])
        moved.append(store.bytes_moved - before)
    row = replace(layer, element_bytes=2).row_columns * 2
    assert moved[0] < moved[1] <= moved[0] + 8 * row
