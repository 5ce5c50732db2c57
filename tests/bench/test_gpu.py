"""`hpcdecode bench gpu` says that there is no GPU; its parts run on the CPU with small sizes, attention emulated."""

from __future__ import annotations

import argparse

import pytest
import torch

from hpcdecode.bench import gpu as bench_gpu
from hpcdecode.bench import gpu_torch
from hpcdecode.bench.contenders import Site
from hpcdecode.bench.gpu import Arrangement
from hpcdecode.bench.workload import Workload
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.late_copies import LateCopies

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match="expected a GPU and a CUDA build of torch, found none"):
        bench_gpu.run(argparse.Namespace())


def test_every_part_yields_its_cases(tmp_path):
    site = Site(tmp_path, "tiny")
    found = [*bench_gpu.attention(CPU, 2, [70], ["int8"], 1)]
    found += gpu_torch.latents(CPU, 2, [70], ["bfloat16", "k8v4"], 1, ["glm-4.7-flash"])
    found += gpu_torch.states(CPU, 2, 1, ["gated-deltanet"])
    model = load_split(site.checkpoint, dtype="bfloat16")
    found += bench_gpu.slices(model, site.shape, 3, 1)
    found += bench_gpu.transfers(model, LateCopies(-1), 3, 1)
    each = {1: bench_gpu.step_seconds(model, 4, 1)}
    worlds = [Arrangement("one", 1, 1, ("--device", "cpu")), Arrangement("other", 1, 0, ("--device", "cpu"))]
    found += bench_gpu.jobs(site, Workload("t", 6, 4, 9, 3), worlds, ["--batch", "4"], 4, each)
    names = (
        ["attention"] * 3
        + ["attention"]  # k8v4 is no data type of latents
        + ["states by torch"]
        + ["slices", "transfers", "job", "S-rank idle while rows decode", "job"]
    )
    assert [c["case"].split(",")[0] for c in found] == names
    assert all(c["reference"] for c in found)
    assert all(c["value"] > 0 for c in found if c["unit"] in ("tokens/s", "GB/s"))


def test_worlds_use_every_gpu_and_numa_node():
    flags = {w.name: (w.ranks, " ".join(w.flags)) for w in bench_gpu.worlds(nodes=4, gpus=2)}
    assert flags["S on a GPU, R on the CPUs"] == (5, "--device cuda --s-ranks 1")
    assert flags["S on a GPU, R on GPUs and CPUs"] == (6, "--device cuda --s-ranks 1 --r-device auto")
    assert [w.ranks for w in bench_gpu.worlds(nodes=1, gpus=1)] == [1, 1, 2, 2, 1]
