"""Token parity with transformers' `generate`, for every architecture, over worlds of 1, 2 and 4 ranks."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.models import ARCHITECTURES
from tests.parity import make_case

# world : period F : lanes
SOME_RUNS = ("1:7:2", "2:1:1", "4:7:2")
ALL_RUNS = tuple(f"{world}:{period}:{lanes}" for world in (1, 2, 4) for period in (1, 7) for lanes in (1, 2))
LINE = re.compile(r"PARITY (\S+) (\S+) world (\d) F (\d+) lanes (\d): (\d+) rows differ")


def parity(mpiexec, directory, dtype, runs, **case):
    """Rows that differ, by architecture and run."""
    cases = [make_case(name, directory, **case) for name in ARCHITECTURES]
    result = mpiexec(4, "tests/mpi/run_parity.py", dtype, ",".join(runs), *cases, timeout=3000)
    differing = defaultdict(dict)
    for name, _, world, period, lanes, rows in LINE.findall(result.stdout):
        differing[name][f"{world}:{period}:{lanes}"] = int(rows)
    assert len(differing) == len(ARCHITECTURES), result.stderr[-4000:]
    return differing


@pytest.fixture(scope="module")
def float32(mpiexec, tmp_path_factory):
    return parity(mpiexec, tmp_path_factory.mktemp("float32"), "float32", SOME_RUNS, rows=8, new_tokens=24)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_those_of_transformers(float32, name):
    assert float32[name] == dict.fromkeys(SOME_RUNS, 0)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_world_period_and_lane_count(mpiexec, tmp_path, dtype):
    """float32: equal to transformers. bfloat16: for each schedule, equal between worlds of 1, 2 and 4 ranks."""
    differing = parity(mpiexec, tmp_path, dtype, ALL_RUNS)
    assert differing == {name: dict.fromkeys(ALL_RUNS, 0) for name in ARCHITECTURES}
