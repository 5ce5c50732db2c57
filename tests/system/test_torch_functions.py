"""First calls of torch's functions by several threads at once; without settle_functions 1 of 1,200 differed."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_CALLS = """
import os, sys
import numpy as np, torch
from hpcdecode.system.torch_functions import settle_functions

angles, wrong = torch.from_numpy(np.linspace(0.1, 50, 40000, dtype="f4")), 0


def first_call(name):
    torch.set_num_threads(4)
    settle_functions()
    first, second = getattr(torch, name)(angles), getattr(torch, name)(angles)
    os._exit(not torch.equal(first, second))


for _ in range(int(sys.argv[1]) // 12):
    children = []
    for name in ("cos", "sin", "exp") * 4:  # more than there are cores
        if not (child := os.fork()):
            first_call(name)
        children.append(child)
    wrong += sum(os.waitpid(child, 0)[1] != 0 for child in children)
print(wrong)
"""


@pytest.mark.parametrize("processes", [120, pytest.param(12000, marks=pytest.mark.full)])
def test_first_calls_equal_second_ones(processes):
    line = [sys.executable, "-c", FIRST_CALLS, str(processes)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60 + processes / 20, check=True)
    assert done.stdout == "0\n"
