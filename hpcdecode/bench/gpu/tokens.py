"""The first day's proof that jobs give the same tokens wherever S and R are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcdecode.bench.contenders import Hpcdecode, Site, launcher
from hpcdecode.bench.gpu.findings import Conditions, Findings
from hpcdecode.bench.workload import Workload, checkpoint

Worlds = dict[str, tuple[int, tuple[str, ...]]]  # ranks and flags by name
_AT_ONCE = 4  # jobs, each on cores of its own
_GPU_WORLDS: Worlds = {
    "S on the GPU": (1, ("--device", "cuda")),
    "all on the GPU": (1, ("--device", "cuda", "--r-device", "cuda")),
    "R on the GPU": (1, ("--device", "cpu", "--r-device", "cuda")),
    "S on the GPU, two R-ranks": (3, ("--s-ranks", "1", "--device", "cuda")),
    "S on the GPU, R where auto puts it": (3, ("--s-ranks", "1", "--device", "cuda", "--r-device", "auto")),
    "S and R on GPUs, apart": (2, ("--s-ranks", "1", "--device", "cuda", "--r-device", "cuda")),
    "the same through host memory": (2, ("--s-ranks", "1", "--device", "cuda", "--r-device", "cuda", "--no-gpu-mpi")),
}
_CPU_WORLDS: Worlds = {"S and two R-ranks": (3, ("--s-ranks", "1", "--device", "cpu"))}


def parity(on: Conditions, findings: Findings) -> None:
    """Compare the tokens of worlds of 1 to 3 ranks with those of one process on CPUs, in float32."""
    worlds = _CPU_WORLDS if on.emulated else _GPU_WORLDS
    work = Workload("parity", 6 if on.emulated else 24, 1, 200, 8 if on.emulated else 24)
    model, at_once = checkpoint(on.work, "tiny"), 1 if on.emulated else _AT_ONCE
    asked: Worlds = {"CPU": (1, ("--device", "cpu")), **worlds}
    shares = _shares(at_once)

    def tokens(place: int) -> list[list[int]] | str:
        """Return the tokens of a world, or why there are none."""
        name, (ranks, flags) = list(asked.items())[place]
        try:
            return _tokens(on.folder / f"parity-{place}", model, work, ranks, flags, shares[place % at_once])
        except Exception as error:  # other worlds are to be seen, too
            return f"{name}: {error}"

    with ThreadPoolExecutor(at_once) as pool:
        found = dict(zip(asked, pool.map(tokens, range(len(asked))), strict=True))
    expected = found.pop("CPU")
    size = f"{work.rows} rows of {work.new}"
    findings.check("tokens on CPUs", size, _told(expected, expected), isinstance(expected, list))
    for name, each in found.items():
        findings.check(f"tokens, {name}", "those of CPUs", _told(each, expected), each == expected)


def _told(found: list[list[int]] | str, expected: list[list[int]] | str) -> str:
    if isinstance(found, str) or isinstance(expected, str):
        return found if isinstance(found, str) else "nothing to compare with"
    return f"{sum(a != b for a, b in zip(found, expected, strict=True))} of {len(found)} rows differ"


def _tokens(
    folder: Path, model: Path, work: Workload, ranks: int, flags: Sequence[str], prefix: Sequence[str]
) -> list[list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    size = ["--dtype", "float32", "--kv-memory", "64M", "--batch", "10"]
    launcher(ranks)
    return Hpcdecode(Site(folder, str(model), prefix), ranks, [*size, *flags]).run(work).tokens


def _shares(count: int) -> list[list[str]]:
    """Return, for each of some jobs at once, what to put before a command to give it cores of its own."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // count
    if not shutil.which("taskset") or each < 1 or count == 1:
        return [[] for _ in range(count)]
    lists = [cpus[i * each : (i + 1) * each] for i in range(count)]
    return [["taskset", "-c", ",".join(map(str, own))] for own in lists]
