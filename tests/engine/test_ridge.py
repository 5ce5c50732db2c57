"""B of a lane on a GPU: as many sequences as its GEMMs are worth, where the KV cache has room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcdecode.config import EngineOptions
from hpcdecode.engine import ridge
from hpcdecode.engine.scale import choose_scales, rows_ahead
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt

SETUP = SimpleNamespace(
    max_positions=4096, state_tokens=0, block_tokens=16, dtype="bfloat16", kv_dtype="bfloat16", shapes_of=lambda _: []
)


@pytest.mark.parametrize(
    ("flops", "rate", "itemsize", "expected"),
    [
        (792e12, 2.5e12, 2, 1280),  # an H100 as measured
        (989e12, 4.8e12, 2, 1024),  # an H200 by its data sheet
        (312e12, 2.0e12, 2, 768),  # an A100 by its data sheet
        (50e12, 2.5e12, 4, 256),  # float32
        (1e12, 1e12, 2, 256),
    ],
)
def test_a_lane_has_four_times_the_ridge_point(flops, rate, itemsize, expected):
    assert ridge.lane_batch(flops, rate, itemsize) == expected


def scale(monkeypatch, device, kv_tokens, rows=3000, all_rows=False, **options):
    monkeypatch.setattr(ridge, "measured_lane_batch", lambda device, dtype: {"bfloat16": 1280}[dtype])
    ranks = [
        Rank(rank=0, host="a", cpus=[0], role="S", device=device),
        *(Rank(rank=i, host="a", cpus=[i], role="R", kv_tokens=kv_tokens) for i in (1, 2)),
    ]
    team = Team(SimpleNamespace(rank=0), ranks)
    first = [Prompt(i, str(i), [1] * 100, SamplingParams(max_tokens=201)) for i in range(min(rows, rows_ahead(team)))]
    (found,) = choose_scales(EngineOptions(model="m", **options), team, SETUP, first, all_rows)
    return found


def test_b_of_a_gpu_is_not_that_of_cpus(monkeypatch):
    assert scale(monkeypatch, "cpu", 1 << 20).batch == 256
    on_gpu = scale(monkeypatch, "cuda:0", 1 << 20)
    assert on_gpu.batch == 2560 and on_gpu.lanes == [1280, 1280]
    assert scale(monkeypatch, "cuda:0", 1 << 20, lanes=1).lanes == [1280]


def test_b_of_a_gpu_is_what_its_kv_caches_hold(monkeypatch):
    assert 400 < scale(monkeypatch, "cuda:0", 50_000).batch < 450  # 0.9 of 100,000 tokens, 206 a sequence
    assert scale(monkeypatch, "cuda:0", 1 << 20, batch=96).batch == 96


def test_all_rows_of_a_job_start_at_once_if_there_is_room(monkeypatch):
    whole = scale(monkeypatch, "cuda:0", 1 << 20, rows=1500, all_rows=True)
    assert whole.batch == 1500 and whole.period == whole.steps


def test_optimistic_admission_lets_b_grow_to_it(monkeypatch):
    found = scale(monkeypatch, "cuda:0", 50_000, admission="optimistic")
    assert found.growth == 2560 // found.batch > 1
