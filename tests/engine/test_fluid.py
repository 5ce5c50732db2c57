"""Rows whose KV cache is larger than its memory are what they are with all in memory."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch

from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.streamed_cuda import StreamedCudaKvCache
from hpcdecode.config import EngineOptions, Job
from hpcdecode.engine import fluid
from hpcdecode.engine.fluid import GroupRotation
from hpcdecode.engine.tier_speed import TierSpeed, tier_speed
from hpcdecode.errors import UserError
from hpcdecode.generate import generate
from hpcdecode.model import load_split
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.fluid import gain, step_seconds
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.system import swap_tiers
from hpcdecode.system.model_path import find_model
from hpcdecode.system.swap_tiers import TierSpec
from tests.support.preemption import HastyPlacement
from tests.support.rotating import BLOCK_TOKENS, FaultyTier, file, host, rotating, sizes_of
from tests.support.samples import made, rows, run, with_room
from tests.support.stop_after import copy

FIELDS = [
    (70, {"n": 3, "temperature": 0.9, "max_tokens": 12, "logprobs": 1}),
    (150, {"beam_width": 3, "max_tokens": 8}),
    (130, {"temperature": 0.8, "max_tokens": 14, "repetition_penalty": 1.3, "prompt_logprobs": 1}),
    (20, {"n": 3, "temperature": 0.0, "max_tokens": 6, "logprobs": 0}),
    (190, {"max_tokens": 40, "frequency_penalty": 0.5}),
]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_split(checkpoint("llama3"), dtype="float32")


def prompts():
    """Rows, and as many again that begin as the longest but one of them does."""
    alone = rows(*FIELDS)
    header = alone[1].token_ids[:128]
    return [*alone, *(Prompt(p.line + 10, p.id, header + p.token_ids, p.params) for p in rows(*FIELDS))]


@pytest.fixture(scope="module")
def in_memory(model):
    """What the rows are in a KV cache with room for all, by the number of lanes."""
    return with_room(model, prompts)


@pytest.mark.parametrize(
    ("lanes", "preempts"), [(1, 0.0), (2, 0.0), (1, 0.5), pytest.param(2, 0.5, marks=pytest.mark.full)]
)
def test_rows_are_those_of_a_cache_in_memory(model, in_memory, tmp_path, lanes, preempts):
    """Forks, beams, shared prefixes and chunks of prompts; and, with `preempts`, rows that give up their room."""
    caches = []

    def cache(shapes, slots):
        sizes = sizes_of(shapes, "float32", ranges=24 if not preempts else 16, frames=30, blocks=2)
        caches.append(rotating(shapes, "float32", sizes, file(sizes, tmp_path), slots))
        return caches[-1]

    options = {"placement": type("Placement", (HastyPlacement,), {"rate": preempts})} if preempts else {}
    rotated, worker = run(model, prompts(), lanes=lanes, shared=1000, cache=cache, **options)
    assert made(rotated) == in_memory(lanes)
    counts = caches[0].pages.counts
    assert counts.bytes_in > 0 and counts.bytes_out > 0
    assert not preempts or sum(s.preemptions for s in worker.schedulers) > 5


@pytest.mark.parametrize("lanes", [1, 2])
def test_rows_on_a_gpu_are_those_of_a_cache_in_memory(model, lanes):
    """The same on an emulated GPU, whose kernels give other bits than those of CPUs."""
    caches = []

    def in_memory(shapes, slots):
        return CudaKvCache(shapes, "float32", 1 << 14, slots, BLOCK_TOKENS, "cpu")

    def cache(shapes, slots):
        sizes = sizes_of(shapes, "float32", ranges=24, frames=30, blocks=2, device=True)
        caches.append(StreamedCudaKvCache(shapes, "float32", sizes, host(sizes), slots, BLOCK_TOKENS, "cpu"))
        return caches[-1]

    expected, rotated = (made(run(model, prompts(), lanes=lanes, shared=1000, cache=c)[0]) for c in (in_memory, cache))
    assert rotated == expected
    counts = caches[0].pages.counts
    assert counts.bytes_in > 0 and counts.bytes_out > 0


def test_it_wins_where_weights_take_long_and_the_link_is_fast():
    weights = Cost(8, [1, 64, 256], [0.1, 0.12, 0.16], [1, 256], [0.0, 0.01], 1e-7, 0.0, 0.0, 0.0, 0.0)
    fast, slow = (GroupRotation(capacity=40_000, resident=10_000, rate=rate) for rate in (1e6, 1e4))
    assert step_seconds(fast, weights, 100, 100.0) == pytest.approx(weights.body_seconds(100), rel=0.05)
    assert step_seconds(slow, weights, 400, 100.0) == pytest.approx(3.0)
    assert gain(fast, weights, 400, 100.0) > 2 and gain(slow, weights, 400, 100.0) < 0.5
    assert gain(fast, weights, 50, 100.0) == pytest.approx(1.0)  # all fit
    tokens = Cost(8, [1, 256], [0.001, 0.256], [1, 256], [0.0, 0.0], 1e-7, 0.0, 0.0, 0.0, 0.0)
    assert gain(fast, tokens, 400, 100.0) < 1.05  # no product takes less time a token for others


def test_it_needs_tiers():
    with pytest.raises(UserError, match=r"--schedule fluid: expected --kv-swap.*got none; add --kv-swap"):
        EngineOptions(model="demo", schedule="fluid").check()
    assert EngineOptions(model="demo", schedule="fluid", kv_swap=("host:1G",)).check().admission == "reserve"


SMALL = sizes_of([LayerShape(kv_heads=2, k_dim=64, v_dim=32, q_heads=4, scale=0.3)] * 4, "float32", ranges=8, frames=20)


def test_a_disk_without_room_is_found_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    specs = [TierSpec("host", SMALL.chunk_bytes * 5), TierSpec("nvme", 1 << 30, str(tmp_path))]
    tiers = fluid.open_pages(SMALL, specs)
    assert [tier.chunks for tier in tiers] == [5, 4 * 8 - 5]
    speeds = [tier_speed(tier, SMALL.page_bytes) for tier in tiers]
    assert all(speed.read_rate > 0 and speed.write_rate > 0 for speed in speeds)
    for tier in tiers:
        tier.close()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"--kv-swap nvme:.*expected room for .*No space left.*give a smaller size"):
        fluid.open_pages(SMALL, specs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fault", ["read", pytest.param("write", marks=pytest.mark.full), pytest.param("bits", marks=pytest.mark.full)]
)
def test_a_job_whose_tier_fails_keeps_what_has_ended_and_goes_on(tmp_path, fault):
    """Rows that end, and later ones for which memory has no room."""
    lines = [{"prompt": "a b", "max_tokens": 2}] * 3 + [{"prompt": "a b " * 60, "max_tokens": 30}] * 14
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kv = 128 * 3840 * 6

    def job(name, **options):
        return job_of(tmp_path, name, kv_memory=options.pop("kv_memory", kv), batch=12, **options)

    rotates = {"schedule": "fluid", "kv_swap": (f"host:{5 * kv}",)}
    assert generate(job("plain.h5", kv_memory=1 << 28)) == 0
    kind = type("Failing", (FaultyTier,), {"fault": fault, "after": 40})
    unmeasured = patch.object(fluid, "tier_speed", lambda *_: TierSpeed(1e9, 1e9))
    with patch.object(swap_tiers, "HostTier", kind), unmeasured:
        assert "pages of the KV cache cannot be moved" in failed(job("out.h5", **rotates))
    copy(tmp_path / "out.h5", tmp_path / "again.h5")  # this process holds the other
    assert generate(job("again.h5", **rotates)) == 0
    plain, out = (tokens_of(tmp_path / name) for name in ("plain.h5", "again.h5"))
    assert plain == out


def test_three_groups_lie_in_memory_of_twelve_in_flight(tmp_path):
    """Four rows a group: memory has room for those of three, and all twelve decode in every step."""
    lines = [{"prompt_token_ids": [5 + (3 * i + j) % 900 for j in range(60 + i % 5)]} for i in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    params, group = SamplingParams(ignore_eos=True, max_tokens=25), 4 * 128 * 3840  # bytes: blocks have 64 tokens
    same = {"params": params, "batch": 48}
    assert generate(job_of(tmp_path, "plain.h5", kv_memory=1 << 28, **same)) == 0
    for name, tier in (("host", f"host:{16 * group}"), ("file", f"nvme:{tmp_path}:{16 * group}")):
        rotates = {"schedule": "fluid", "kv_memory": 3 * group, "kv_swap": (tier,)}
        assert generate(job_of(tmp_path, f"{name}.h5", **rotates, **same)) == 0
        assert tokens_of(tmp_path / f"{name}.h5") == tokens_of(tmp_path / "plain.h5")
        with h5py.File(tmp_path / f"{name}.h5") as file:
            summary = json.loads(file.attrs["summary"])
        assert summary["peak_load_tokens"] > 48 * 80 and summary["swap_in_bytes"] > 10 * 8 * group
    assert generate(job_of(tmp_path, "reserve.h5", kv_memory=3 * group, **same)) == 0
    assert tokens_of(tmp_path / "reserve.h5") == tokens_of(tmp_path / "plain.h5")


def test_a_job_whose_pages_lie_on_a_gpu(tmp_path, monkeypatch):
    """The GPU that has the KV cache is emulated; its link to the host is not measured."""
    lines = [{"prompt_token_ids": [5 + (3 * i + j) % 900 for j in range(60 + i % 5)]} for i in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    group = 4 * 128 * 3840
    same = {"params": SamplingParams(ignore_eos=True, max_tokens=25), "batch": 48}
    monkeypatch.setattr(fluid, "_gpu_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(fluid, "link_rate", lambda *_: 1e9)
    opened = []

    def piece(nbytes):
        opened.append(nbytes)
        return np.empty(nbytes, np.uint8)

    monkeypatch.setattr(fluid, "PinnedMemory", lambda _: SimpleNamespace(take=piece))
    made = []
    for memory in (3, 9):
        rotates = {"schedule": "fluid", "kv_memory": memory * group, "kv_swap": (f"host:{16 * group}",)}
        assert generate(job_of(tmp_path, f"{memory}.h5", **rotates, **same)) == 0
        with h5py.File(tmp_path / f"{memory}.h5") as file:
            made.append(json.loads(file.attrs["summary"])["swap_in_bytes"])
    assert tokens_of(tmp_path / "3.h5") == tokens_of(tmp_path / "9.h5")
    assert made[0] > made[1] > 0 and opened
    assert generate(job_of(tmp_path, "plain.h5", kv_memory=1 << 28, **same)) == 0
    assert tokens_of(tmp_path / "3.h5") == tokens_of(tmp_path / "plain.h5")
    with pytest.raises(UserError, match=r"fluid: expected layers that a GPU has kernels for, .*--kv-dtype int8"):
        latent = [LayerShape(1, 48, 32, 4, 0.2, latent=True)] * 2
        setup = SimpleNamespace(kv_dtype="int8", block_tokens=64)
        fluid.measure_rotation(EngineOptions(model="demo"), SimpleNamespace(me=None), setup, latent, 1 << 20)


def job_of(folder, name, **options):
    """Return a job of the demo model for rows.jsonl of a folder."""
    where = {"prompts": (str(folder / "rows.jsonl"),), "output": str(folder / name)}
    params = {"dtype": "float32", "params": SamplingParams(ignore_eos=True)}
    return Job(model=find_model("demo", {}), **where, **(params | options)).check()


def failed(job):
    """Return the error that a job ends with."""
    try:
        generate(job)
    except UserError as error:
        return str(error)
    return pytest.fail("the job did not fail")


def tokens_of(path):
    with h5py.File(path) as file:
        order = file["rows/line"][:].argsort()
        ends = file["rows/token_offsets"][:]
        return [file["rows/token_ids"][ends[i] : ends[i + 1]].tolist() for i in order]
