"""`hpcdecode bench gpu` says that there is no GPU; its parts run on the CPU with small sizes, attention emulated."""

from __future__ import annotations

import argparse

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.perf import bench_gpu
from hpcdecode.perf.workload import SHAPES, Workload, checkpoint
from tests.late_copies import LateCopies

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match="expected a GPU and a CUDA build of torch, found none"):
        bench_gpu.run(argparse.Namespace())


def test_every_part_yields_its_cases(tmp_path):
    folder, shape = checkpoint(tmp_path, "tiny"), SHAPES["tiny"]
    found = [*bench_gpu.attention(CPU, 2, [70], ["int8"], 1)]
    model = load_split(folder, dtype="bfloat16")
    found += bench_gpu.slices(model, shape, 3, 1)
    found += bench_gpu.transfers(model, LateCopies(-1), 3, 1)
    worlds = {"one": {"device": "cpu"}, "other": {"device": "cpu"}}
    found += bench_gpu.jobs(folder, Workload("t", 6, 4, 9, 3).prompts(shape), 3, 4, None, worlds)
    assert [c["case"].split(",")[0] for c in found] == ["attention"] * 3 + ["slices", "transfers", "job", "job"]
    assert all(c["value"] >= 0 and c["reference"] for c in found)
    assert all(c["value"] > 0 for c in found if c["unit"] != "ms a step")
