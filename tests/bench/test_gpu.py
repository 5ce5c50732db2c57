"""`hpcdecode bench gpu` says that there is no GPU; its parts run on the CPU with small sizes, attention emulated."""

from __future__ import annotations

import argparse

import pytest
import torch

from hpcdecode.bench import gpu as bench_gpu
from hpcdecode.bench.contenders import Site
from hpcdecode.bench.device_clock import device_seconds
from hpcdecode.bench.gpu.attention import attention, latents
from hpcdecode.bench.gpu.jobs import Arrangement, jobs, worlds
from hpcdecode.bench.gpu.slices import products_of, slices, step_seconds, weight_sets
from hpcdecode.bench.gpu.states import states
from hpcdecode.bench.gpu.transfers import transfers
from hpcdecode.bench.workload import SHAPES, Workload
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.late_device import LateDevice

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("first_day", [False, True])
def test_without_a_gpu_it_says_so(first_day):
    with pytest.raises(UserError, match="expected a GPU and a CUDA build of torch, found none"):
        bench_gpu.run(argparse.Namespace(first_day=first_day, emulated=False))


def test_every_part_yields_its_cases(tmp_path):
    site = Site(tmp_path, "tiny")
    found = [*attention(CPU, 2, [70], ["int8"], 1)]
    found += latents(CPU, 2, [70], ["bfloat16", "k8v4"], 1, ["glm-4.7-flash"])
    found += states(CPU, 2, 1, ["gated-deltanet"])
    model = load_split(site.checkpoint, dtype="bfloat16")
    found += slices(model, site.shape, 3, 1)
    found += transfers(model, LateDevice(patience=0), 3, 1)
    each = {1: step_seconds(model, 4, 1)}
    among = [Arrangement("one", 1, 1, ("--device", "cpu")), Arrangement("other", 1, 0, ("--device", "cpu"))]
    found += jobs(site, Workload("t", 6, 4, 9, 3), among, ["--batch", "4"], 4, each)
    names = (
        ["attention"] * 3
        + ["attention"]  # k8v4 is no data type of latents
        + ["states of gated-deltanet", "prompts through states of gated-deltanet"]
        + ["slices", "transfers", "job", "S-rank idle while rows decode", "job"]
    )
    assert [c["case"].split(",")[0] for c in found] == names
    assert all(c["reference"] for c in found)
    assert all(c["value"] > 0 for c in found if c["unit"] in ("tokens/s", "GB/s"))


def test_worlds_use_every_gpu_and_numa_node():
    flags = {w.name: (w.ranks, " ".join(w.flags)) for w in worlds(nodes=4, gpus=2)}
    assert flags["S on a GPU, R on the CPUs"] == (5, "--device cuda --s-ranks 1")
    assert flags["S on a GPU, R on GPUs and CPUs"] == (6, "--device cuda --s-ranks 1 --r-device auto")
    assert [w.ranks for w in worlds(nodes=1, gpus=1)] == [1, 1, 2, 2, 1]


@pytest.mark.parametrize("name", ["355m", "8b", "8b-4-layers"])
def test_bare_products_take_weights_that_no_cache_holds(name):
    shape = SHAPES[name]
    layer = 2 * sum(inputs * outputs for inputs, outputs in shape.linears)
    assert weight_sets(shape, 2) * layer > 200 << 20


class Products(torch.overrides.TorchFunctionMode):
    """Keeps the weights of GEMMs in their order, and computes nothing."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            self.weights.append(args[1])
            return None
        return func(*args, **(kwargs or {}))


def test_products_of_a_layer_take_other_weights_than_the_layer_before(tmp_path):
    """The weights of a small model together, as often as its layers have them."""
    shape = SHAPES["tiny-6-layers"]
    model = argparse.Namespace(dtype=torch.bfloat16, device=CPU)
    products = products_of(model, shape, 2)
    with Products() as seen:
        products()
    assert len(seen.weights) == 4 * shape.layers + 1
    assert len({id(weight) for weight in seen.weights}) == len(seen.weights)


def test_seconds_are_those_of_one_call():
    calls = []
    assert device_seconds(lambda: calls.append(torch.ones(8).sum()), CPU, times=5) > 0
    assert len(calls) == 5
