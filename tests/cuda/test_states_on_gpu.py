"""On a GPU: kernels over recurrent states against float64, and a sequence alone against the same one in company."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.cuda import serves_states
from hpcdecode.attention.device_states import DeviceStateStore
from hpcdecode.bench.stateful_layers import exact, random_numbers, random_rows
from tests.support.recurrent_cases import LAYERS

SERVED = [name for name in LAYERS if serves_states(LAYERS[name])]
GPU = "cuda:0"


def opened(name, dtype, state_dtype="float32"):
    layer = replace(LAYERS[name], element_bytes=dtype.itemsize, state_dtype=state_dtype)
    return DeviceStateStore([layer], [random_numbers(layer)], 4, 4, GPU)


def advance(store, slots, rows):
    counts = [len(r) for r in rows]
    out = torch.full((sum(counts), store.layers[0].out_columns), float("nan"), dtype=rows[0].dtype, device=GPU)
    store.extend(slots, counts)
    store.run(0, slots, counts, torch.cat(rows).to(GPU), out)
    return list(out.cpu().split(counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SERVED)
def test_against_float64(name, dtype):
    rows, store = random_rows(LAYERS[name], 500, dtype), opened(name, dtype)
    out = torch.cat([advance(store, [3], [part])[0] for part in rows.split([400, 1, 1, 98])])
    expected = exact(LAYERS[name], random_numbers(LAYERS[name]), rows)
    tolerance = (5e-5 if dtype == torch.float32 else 2**-8) * expected.abs().max()
    assert (out.double() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SERVED)
def test_bits_do_not_depend_on_chunks_or_company(name, state_dtype):
    rows = [random_rows(LAYERS[name], n, torch.bfloat16, seed=n) for n in (70, 9)]
    alone = [advance(opened(name, torch.bfloat16, state_dtype), [0], [r])[0] for r in rows]
    store = opened(name, torch.bfloat16, state_dtype)
    first, second = advance(store, [1, 2], [rows[0][:60], rows[1][:8]])
    last = advance(store, [2, 1], [rows[1][8:], rows[0][60:]])
    assert torch.equal(torch.cat([first, last[1]]), alone[0])
    assert torch.equal(torch.cat([second, last[0]]), alone[1])
