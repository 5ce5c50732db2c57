"""Looks over the machine code of the kernels: python tests/cuda/sass.py LIBRARY. For `make cuda`.

Prints a table of instructions by kernel. Attention kernels use no local memory, and tensor cores unless they multiply
float32. Without cuobjdump nothing is looked over.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SHOWN = ("HMMA", "LDSM", "LDS", "LDGSTS", "LDG", "PRMT", "F2F", "F2FP", "MUFU", "BAR", "LDL", "STL")
LOCAL = ("LDL", "STL")
INSTRUCTIONS = range(300, 16_000)  # of an attention kernel; as built they have 1,500 to 7,000
LEAST_PRODUCTS = 8  # HMMA of a kernel that multiplies on tensor cores
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
ATTENTION = re.compile(r"\d(attend|latent)\w*_kernel")
FLOAT = re.compile(r"NumF32|ByFloat|by_float")


class Kernel(NamedTuple):
    """A kernel's name, and the number of its instructions by opcode."""

    name: str
    counts: Counter[str]

    @property
    def shown(self) -> str:
        """Return the name without namespaces."""
        return re.sub(r"^_ZN9hpcdecode\d+_GLOBAL__N__\w+?_cu_[0-9a-f]{8}\d+", "", self.name)[:64]


def kernels(text: str) -> list[Kernel]:
    """Return the kernels of what `cuobjdump -sass` prints."""
    found: list[Kernel] = []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            found.append(Kernel(match[1], Counter()))
        elif found and (match := INSTRUCTION.match(line)):
            found[-1].counts[match[1]] += 1
    return found


def problems(found: list[Kernel]) -> list[str]:
    """Return what is wrong with the attention kernels."""
    attention = [kernel for kernel in found if ATTENTION.search(kernel.name)]
    wrong = [] if attention else ["no attention kernel"]
    for kernel in attention:
        counts, total = kernel.counts, kernel.counts.total()
        if local := sum(counts[each] for each in LOCAL):
            wrong.append(f"{kernel.shown}: {local} accesses of local memory")
        if not FLOAT.search(kernel.name) and counts["HMMA"] < LEAST_PRODUCTS:
            wrong.append(f"{kernel.shown}: {counts['HMMA']} products on tensor cores")
        if total not in INSTRUCTIONS:
            wrong.append(f"{kernel.shown}: {total} instructions")
    return wrong


def table(found: list[Kernel]) -> str:
    """Return the counts of each kernel as text."""
    lines = [f"{'instructions':>12} {' '.join(f'{each:>6}' for each in SHOWN)}  kernel"]
    for kernel in sorted(found, key=lambda kernel: kernel.shown):
        counts = " ".join(f"{kernel.counts[each]:>6}" for each in SHOWN)
        lines.append(f"{kernel.counts.total():>12} {counts}  {kernel.shown}")
    return "\n".join(lines)


def tool(name: str) -> str | None:
    """Return the path of a tool of CUDA: on PATH, beside nvcc, or of a package of pip."""
    nvcc = shutil.which("nvcc")
    packages = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")
    beside = [Path(nvcc).resolve().parent] if nvcc else []
    return shutil.which(name) or next((str(d / name) for d in (*beside, *packages) if (d / name).exists()), None)


def main(library: str) -> int:
    """Print the tables; return 1 if something is wrong."""
    cuobjdump = tool("cuobjdump")
    if not cuobjdump:
        print("machine code: not looked over, as there is no cuobjdump; pip install nvidia-cuda-cuobjdump")
        return 0

    def printed(*arguments: str) -> str:
        return subprocess.run([cuobjdump, *arguments, library], check=True, capture_output=True, text=True).stdout

    architectures = sorted(set(re.findall(r"\bsm_\d+", printed("-lelf"))))
    if not architectures:
        print(f"{library}: no machine code", file=sys.stderr)
    code = 0 if architectures else 1
    for architecture in architectures:
        found = kernels(printed("-arch", architecture, "-sass"))
        print(f"{architecture}, {len(found)} kernels\n{table(found)}")
        for problem in problems(found):
            print(f"{architecture}: {problem}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
