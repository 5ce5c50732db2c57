"""GPUs as torch and Linux show them, by a torch of CUDA whose functions are replaced: none is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from hpcdecode.system import gpus
from hpcdecode.system.gpus import Gpu, await_gpus, use_gpu, visible_gpus

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update\nit"


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """Return a function: makes torch one of CUDA that shows these GPUs, or whose start raises an error."""
    calls = []

    def shown(*properties, error=None):
        def init():
            calls.append("init")
            if error:
                raise RuntimeError(error)

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties) or 8)  # as NVML counts
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set {device}"))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: "init" in calls)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
        monkeypatch.setattr(gpus, "_NUMA_NODE", str(tmp_path / "{}"))
        return calls

    return shown


def properties(uuid, bus):
    return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=6)


def test_a_gpu_has_a_name_and_the_node_that_it_is_attached_to(cuda, tmp_path):
    cuda(properties("x", 0x1B), properties("y", 0xC0), properties("z", 0x2), SimpleNamespace())
    (tmp_path / "0000:1b:06.0").write_text("1\n")
    (tmp_path / "0000:c0:06.0").write_text("-1\n")  # of a machine with one node
    assert visible_gpus() == ([Gpu("x", 1), Gpu("y", -1), Gpu("z", -1), Gpu("3", -1)], "")


@pytest.mark.parametrize("error", ["No CUDA GPUs are available", "Found no NVIDIA driver on your system. Please check"])
def test_a_host_without_gpus_has_no_trouble(cuda, error):
    cuda(error=error)
    assert visible_gpus() == ([], "")


def test_a_driver_that_fails_is_told_in_its_words(cuda):
    cuda(error=OLD_DRIVER)
    assert visible_gpus() == ([], OLD_DRIVER.partition("\n")[0])


def test_a_torch_of_cpus_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("was asked"))
    assert visible_gpus() == ([], "")


def test_a_thread_uses_the_gpu_of_a_device(cuda):
    calls = cuda()
    for device in ("cpu", "cpu:0", "cuda", "cuda:3", torch.device("cuda", 1)):
        use_gpu(device)
    assert calls == ["set 0", "set 3", "set 1"]


def test_a_process_that_has_used_a_gpu_waits_for_it(cuda, monkeypatch):
    calls = cuda()
    await_gpus()
    assert calls == []
    calls.append("init")
    await_gpus()
    assert calls == ["init", "synchronize"]

    def lost():
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    await_gpus()
    monkeypatch.delitem(sys.modules, "torch")
    await_gpus()
