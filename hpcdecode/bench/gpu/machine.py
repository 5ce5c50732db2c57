"""The first day's look at the machine, and at what `hpcdecode doctor` says of it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

import torch

from hpcdecode.attention import cuda
from hpcdecode.bench.contenders import launcher
from hpcdecode.bench.gpu.commands import run
from hpcdecode.bench.gpu.findings import Conditions, Findings
from hpcdecode.report.benchmark import machine as facts_of
from hpcdecode.report.metrics import versions

_LEAST_CAPABILITY = (8, 0)


def machine(on: Conditions, findings: Findings) -> None:
    """Note GPUs, their links, versions and capability; check that there are kernels for the GPU."""
    findings.note("machine", facts_of())
    findings.note("versions", {**versions(), "python": platform.python_version()})
    findings.note("tools", {name: shutil.which(name) for name in ("nvidia-smi", "compute-sanitizer", "ncu", "mpiexec")})
    for flags in (("-L",), ("topo", "-m")):
        if tool := shutil.which("nvidia-smi"):
            findings.note(f"nvidia-smi {' '.join(flags)}", run([tool, *flags], 20).text)
    if on.emulated:
        count = cuda.native(on.device).device_count()
        findings.check("devices of the emulated kernels", ">= 1", count, count >= 1)
        return
    properties, capability = torch.cuda.get_device_properties(on.device), torch.cuda.get_device_capability(on.device)
    found = {
        "name": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": list(capability),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "devices": torch.cuda.device_count(),
        "free, total": torch.cuda.mem_get_info(on.device),
    }
    findings.note("GPU", found)
    findings.check("compute capability", ">= 8.0", capability, capability >= _LEAST_CAPABILITY)
    count = cuda.native(on.device).device_count() if cuda.built() else 0
    findings.check("attention on GPUs", "built with CUDA, and a device", cuda.state(), count > 0)


def doctor(on: Conditions, findings: Findings) -> None:
    """Run `hpcdecode doctor` alone and on two ranks; its problems are notes, that it ends is checked."""
    environment = {"CUDA_VISIBLE_DEVICES": ""} if on.emulated else {}
    for ranks in (1, 2):
        line = [*launcher(ranks), sys.executable, "-m", "hpcdecode", "doctor", "--json"]
        code, text = run(line, 60, environment)
        begin = text.find("{\n")
        findings.note(f"doctor on {ranks} ranks", text if code is None or begin < 0 else _short(text[begin:]))
        findings.check(f"doctor on {ranks} ranks", "exit code 0, or 1 with problems", code, code in (0, 1))
    findings.note("cores", sorted(os.sched_getaffinity(0)))


def _short(text: str) -> object:
    """Return the problems that a report of `doctor` tells, or its text if it is cut."""
    try:
        report = json.loads(text)
    except ValueError:
        return text[-2000:]
    told, first = [f"{p['check']}: {p['finding']}" for p in report["problems"]], report["ranks"][0]
    return {"problems": told, "attention on GPUs": first["gpu_attention"], "mpi": first["mpi"]}
