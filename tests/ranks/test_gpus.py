"""Ranks and GPUs: who has one, who shares one, what memory and cores each gets, and what is told of drivers."""

from __future__ import annotations

import logging
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import hpcdecode
from hpcdecode.attention import cuda
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.config import EngineOptions
from hpcdecode.engine import engine, room
from hpcdecode.engine.engine import Engine
from hpcdecode.errors import UserError
from hpcdecode.ranks import launch, node_memory, team
from hpcdecode.ranks.layout import assign_roles
from hpcdecode.ranks.roles import Rank, assign_cores, assign_devices
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.system.gpus import Gpu, VisibleGpus

GIB = 1 << 30
SHAPE = LayerShape(kv_heads=1, k_dim=64, v_dim=64, q_heads=1, scale=1.0)


def world(*seen, host="a", **facts):
    return [Rank(rank=i, host=host, cpus=[i], gpus=list(gpus), **facts) for i, gpus in enumerate(seen)]


def layout(ranks, r_device="cpu", device=None, **wishes):
    """Return role and devices of every rank."""
    assign_roles(ranks, Wishes(**wishes))
    assign_devices(ranks, device, r_device)
    return [f"{r.role} {' '.join([r.device] * r.has_s + [r.kv_device] * r.has_r)}" for r in ranks]


def test_ranks_that_see_one_gpu_are_one_s_rank_and_r_ranks_on_cpus():
    assert layout(world(*"xxxx")) == ["S cuda:0", "R cpu", "R cpu", "R cpu"]
    assert layout(world(*"xxxx"), "auto") == ["S cuda:0", "R cpu", "R cpu", "R cpu"]


def test_gpus_are_counted_not_the_ranks_that_see_them():
    """Ranks 0 and 1 see the same one, and rank 2 another."""
    assert layout(world("x", "x", "y", "")) == ["S cuda:0", "R cpu", "S cuda:0", "R cpu"]
    assert layout(world("xy", "x", "", "")) == ["S cuda:1", "S cuda:0", "R cpu", "R cpu"]
    hosts = [*world("x", "x"), *world("x", "x", host="b")]  # two GPUs, if of one name
    for rank, each in enumerate(hosts):
        each.rank = rank
    assert layout(hosts) == ["S cuda:0", "R cpu", "S cuda:0", "R cpu"]


def test_weights_on_gpus_of_their_own_take_no_memory_of_hosts():
    assert assign_roles(world("x", "y", memory=100, weights=90), Wishes()).startswith("2 replicas")
    assert assign_roles(world("", "", memory=100, weights=90), Wishes()).startswith("one model of 2 ranks")


def test_copies_of_weights_on_gpus_are_no_reason_to_share_memory_of_hosts():
    ranks = world("x", "", memory=100, weights=90)
    for rank, device in zip(ranks, ("cuda:0", "cpu"), strict=True):
        rank.role, rank.device = "S", device
    assert node_memory._are_large(Team(None, ranks))
    ranks[1].role = "R"
    assert not node_memory._are_large(Team(None, ranks))


@pytest.fixture
def card(monkeypatch):
    """Torch's figures of a GPU of 80 GiB, of which 60 are free and 10 hold weights of this process."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(cuda, "block_bytes", lambda shapes, kv_dtype, block_tokens, device: 256 * block_tokens)
    monkeypatch.setattr(cuda, "serves", lambda shapes, kv_dtype, device: True)


def r_ranks(*names, host="a"):
    """Return a team of an S-rank on GPU x, and R-ranks on these GPUs, the first of which is this rank."""
    ranks = world(*names, "x", host=host)
    for rank in ranks[:-1]:
        rank.role, rank.kv_device = "R", "cuda:0"
    ranks[-1].role, ranks[-1].device = "S", "cuda:0"
    return Team(None, ranks)


def cache_gib(ranks, **flags):
    setup = SimpleNamespace(kv_dtype="bfloat16", block_tokens=64, state_tokens=0, mapped_bytes=0)
    return room._room(EngineOptions(model="", r_device="cuda", **flags), ranks, setup, [SHAPE]) * 256 / GIB


def test_r_ranks_on_one_gpu_share_what_is_free(card):
    assert cache_gib(r_ranks("x")) == pytest.approx(60 * 0.7, rel=1e-4)
    assert cache_gib(r_ranks("x", "x", "x")) == pytest.approx(20 * 0.7, rel=1e-4)
    assert cache_gib(r_ranks("x", "x", "y")) == pytest.approx(30 * 0.7, rel=1e-4)
    other = r_ranks("x", "x")
    other.ranks[1].host = "b"  # where it is another one
    assert cache_gib(other) == pytest.approx(60 * 0.7, rel=1e-4)
    assert cache_gib(r_ranks("x", "x"), gpu_memory=30 * GIB) == pytest.approx(20 * 0.7, rel=1e-4)  # less 10 of weights
    assert cache_gib(r_ranks("x", "x"), kv_memory=5 * GIB) == 5


def test_sizes_that_ranks_on_one_gpu_cannot_have_at_once_are_refused(card):
    def check(ranks, **flags):
        room._require_device(EngineOptions(model="", r_device="cuda", **flags), ranks)

    check(r_ranks("x", "x"), kv_memory=40 * GIB)
    with pytest.raises(UserError, match=r"--kv-memory: expected at most 40.0G for each of 2 ranks, as cuda:0 on a has"):
        check(r_ranks("x", "x"), kv_memory=41 * GIB)
    check(r_ranks("y", "x"), kv_memory=80 * GIB, gpu_memory=80 * GIB)
    with pytest.raises(UserError, match=r"--gpu-memory: expected at most 26.7G for each of 3 ranks"):  # S is one, too
        check(r_ranks("x", "x"), gpu_memory=27 * GIB)
    with pytest.raises(UserError, match=r"--kv-memory: expected at most 80.0G, as cuda:0 on a has 80.0G"):
        check(r_ranks("y"), kv_memory=81 * GIB)


def test_weights_of_s_ranks_on_gpus_leave_the_memory_of_hosts_to_kv_caches(monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda: 100)
    ranks = Team(None, [Rank(rank=0, host="a", cpus=[0], role="R"), Rank(rank=1, host="a", cpus=[1], role="S")])
    options, setup = EngineOptions(model=""), SimpleNamespace(mapped_bytes=50)
    assert room._kv_bytes(options, ranks, setup) == 35
    ranks.ranks[1].device = "cuda:0"
    assert room._kv_bytes(options, ranks, setup) == 70


def machine(*gpu_nodes, per_node=16, ranks=3):
    """Return ranks that were given all cores of two NUMA nodes; the first ones see the GPUs."""
    cpus, nodes = list(range(2 * per_node)), [0] * per_node + [1] * per_node
    seen = list(map(str, range(len(gpu_nodes))))
    made = [Rank(rank=i, host="a", cpus=cpus, nodes=nodes) for i in range(ranks)]
    for rank in made[: len(gpu_nodes)]:
        rank.gpus, rank.gpu_nodes = seen, list(gpu_nodes)
    return made


def dealt(ranks, r_device="cpu", **wishes):
    layout(ranks, r_device, **wishes)
    assign_cores(ranks)
    cpus = [cpu for rank in ranks for cpu in rank.cpus]
    assert sorted(cpus) == list(range(len(cpus))) and all(r.pinned and r.threads == len(r.cpus) for r in ranks)
    return [(len(r.cpus), set(r.nodes)) for r in ranks]


def test_a_rank_on_a_gpu_has_four_cores_of_its_node():
    """The others have the rest, of one node each."""
    assert dealt(machine(1)) == [(4, {1}), (16, {0}), (12, {1})]
    assert dealt(machine(0)) == [(4, {0}), (12, {0}), (16, {1})]
    assert dealt(machine(1, ranks=4)) == [(4, {1}), (9, {0}), (9, {0, 1}), (10, {1})]  # which do not divide


def test_cores_of_a_node_that_has_too_few_come_from_others():
    assert dealt(machine(1, 1, per_node=3, ranks=3), s_ranks=2) == [(2, {1}), (2, {0, 1}), (2, {0})]
    assert dealt(machine(1, 0, ranks=2), "cuda", s_ranks=1) == [(16, {1}), (16, {0})]


def test_a_node_that_is_not_known_gets_any_cores():
    assert [count for count, _ in dealt(machine(-1))] == [4, 12, 16]
    ranks = machine(0)
    for rank in ranks:
        rank.nodes, rank.gpu_nodes = [], []
    assert dealt(ranks) == [(4, set()), (14, set()), (14, set())]


class Stopped(Exception):
    pass


def sr_rank(device="cuda:1"):
    """Return a team of one rank of both roles that sees two GPUs."""
    own = Rank(rank=0, host="a", cpus=[0], gpus=["x", "y"], role="SR", device=device, kv_device=device)
    return Team(None, [own])


def test_an_engine_uses_its_gpu_before_all_else(monkeypatch):
    """In whatever thread it works."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device, threading.get_ident())))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(engine, "limit_torch", lambda *_: calls.append("limit"))

    def load(*_):
        calls.append("load")
        raise Stopped

    monkeypatch.setattr(engine, "load", load)
    own = threading.get_ident()
    for device, number in (("cuda:1", 1), ("cuda:0", 0)):
        calls.clear()
        with pytest.raises(Stopped):
            Engine(EngineOptions(model=""), sr_rank(device))
        assert calls == [("set", number, own), "limit", "load"]
    calls.clear()
    with pytest.raises(Stopped):
        Engine(EngineOptions(model=""), sr_rank("cpu"))
    assert calls == ["limit", "load"]

    made = Engine.__new__(Engine)
    made.options, made.team = EngineOptions(model=""), sr_rank()
    monkeypatch.setattr(Engine, "open", lambda self, _: None)
    monkeypatch.setattr(Engine, "_run", lambda self, *_: calls.append("run") or True)
    monkeypatch.setattr(Engine, "metrics", lambda self: "metrics")
    calls.clear()
    thread = threading.Thread(target=made.work, args=(None, [], None, None, 0.0))
    thread.start()
    thread.join()
    (_, number, which), last = calls
    assert (number, last) == (1, "run") and which != own


def test_a_kv_cache_uses_its_gpu_before_it_takes_memory(monkeypatch):
    calls = []

    def kv_cache(*args, **of_pages):
        calls.append(("memory", args[-1]))
        raise MemoryError

    module = SimpleNamespace(LayerShape=lambda *args, **named: None, KvCache=kv_cache, CapacityError=RuntimeError)
    monkeypatch.setattr(cuda, "native", lambda device: module)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    with pytest.raises(torch.OutOfMemoryError):
        CudaKvCache([SHAPE], "bfloat16", 1024, 4, device="cuda:1")
    assert calls == [("set", 1), ("memory", 1)]


OLD = "CUDA driver version is insufficient (the driver runs CUDA 12.2, this was built with 13.0)"


@pytest.fixture
def old_driver(monkeypatch):
    def device_count():
        raise RuntimeError(OLD)

    module = SimpleNamespace(device_count=device_count)
    monkeypatch.setitem(sys.modules, "hpcdecode._attn_cuda", module)
    monkeypatch.setattr(hpcdecode, "_attn_cuda", module, raising=False)
    monkeypatch.setattr(cuda, "built", lambda: True)
    return module


def test_a_toolkit_newer_than_the_driver_is_told(old_driver):
    assert cuda.state() == f"built with CUDA, {OLD}"
    with pytest.raises(UserError, match="expected a driver that runs what hpcdecode was built with, got CUDA driver"):
        cuda.native(torch.device("cuda"))
    old_driver.device_count = lambda: 2
    assert cuda.state() == "built with CUDA, 2 devices" and cuda.native(torch.device("cuda")) is old_driver


@pytest.mark.parametrize(("device", "r_device"), [(None, "cpu"), ("cuda", "cpu"), ("cpu", "cuda"), ("cpu", "cpu")])
def test_a_driver_that_fails_is_told_at_the_start(device, r_device, monkeypatch, caplog):
    """As an error if a GPU is asked for, as a warning if it would have been taken."""
    monkeypatch.setattr(team, "visible_gpus", lambda: VisibleGpus([], "the driver is too old"))
    if "cuda" in (device, r_device):
        with pytest.raises(UserError, match=r"device cuda: rank 0 on .* cannot use its GPUs: the driver is too old"):
            assemble(None, None, device, r_device)
        return
    with caplog.at_level(logging.WARNING, "hpcdecode"):
        me = assemble(None, None, device, r_device).me
    assert me.gpu == "cpu"
    assert ("GPUs are not used by rank 0 (SR)" in caplog.text) == (device is None)


def test_a_rank_knows_what_it_sees(monkeypatch):
    monkeypatch.setattr(team, "visible_gpus", lambda: VisibleGpus([Gpu("x", 1), Gpu("y", 0)]))
    me = assemble(None, None, None, "cuda").me
    assert (me.gpus, me.gpu_nodes, me.gpu, me.gpu_name) == (["x", "y"], [1, 0], "cuda:0", (me.host, "x"))
    assert me.gpu_node == 1 and len(me.nodes) in (0, len(me.cpus))


def test_a_rank_waits_for_its_gpu_before_exit_handlers_run(monkeypatch):
    """They end the device's context, whatever computes there."""
    calls = []
    monkeypatch.setattr(launch, "_finalize", lambda comm: calls.append("finalize"))
    monkeypatch.setattr(launch, "await_gpus", lambda: calls.append("await"))
    monkeypatch.setattr(launch, "started", lambda: 1)
    handlers = SimpleNamespace(exit=lambda code: calls.append(f"exit {code}"))
    monkeypatch.setattr(launch.ctypes, "PyDLL", lambda name: handlers)

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(launch.os, "_exit", end)
    with pytest.raises(SystemExit):
        launch.leave(SimpleNamespace(), 0)
    assert calls == ["finalize", "await", "exit 0"]
