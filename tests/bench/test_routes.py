"""`bench routes`: the formula, shares of cores, and rotation and fixed routes on ranks."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from hpcdecode.bench.core_shares import CoreShares, line
from hpcdecode.bench.routed import RoutedRun
from hpcdecode.bench.routes import formula
from hpcdecode.errors import UserError

RUN = RoutedRun("rotational", 1.0, 64, 3, 1, step=9.0, way=4.0, slices=4.0, attention=2.0, home=0.5, busy=0.5)


def test_a_step_takes_the_longest_of_home_the_r_rank_and_a_lanes_way():
    change = RUN.__class__
    for fields, longest in (
        ({}, 3 * 4 / 2 + 3 * 0.5),
        ({"attention": 3.0}, 3 * 3.0),
        ({"way": 10.0}, 10.0),
        ({"lanes": 2, "groups": 2}, 2 * (4.0 + 0.5)),  # fixed: each group has its own S-rank
    ):
        values = {name: getattr(RUN, name) for name in RUN.__struct_fields__}
        assert formula(change(**{**values, **fields}), 2) == pytest.approx(longest)


@pytest.fixture
def shares():
    try:
        with CoreShares(2, 0.25) as shares:
            yield shares
    except UserError as error:
        pytest.skip(str(error))


def test_a_rank_has_its_share_of_a_core(shares):
    """A loop of 200 ms of CPU time takes at least 3 times as long with a quarter of a core."""
    loop = "import time\nwhile time.process_time() < 0.2: pass"
    begun = time.monotonic()
    assert os.spawnvp(os.P_WAIT, "sh", [*shares.prefix(1), sys.executable, "-c", loop]) == 0
    assert time.monotonic() - begun > 0.6
    started = line("mpiexec", ["program"], shares)
    assert started.count("program") == 2 and started.count(":") == 1


@pytest.mark.system
def test_both_routes_on_ranks(hpcdecode, tmp_path, shares):
    small = ("--model", "tiny", "--passes", 1, "--batch", 4, "--steps", 2, "--balance", 2)
    result = hpcdecode("bench", "routes", *small, "--work", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    cases = {c["case"]: c for c in json.loads(result.stdout)["cases"]}
    assert len(cases) == 9 and all(c["value"] > 0 for c in cases.values())
    busy = [c["value"] for name, c in cases.items() if name.endswith("S busy")]
    assert len(busy) == 3 and max(busy) <= 100


def test_numbers_that_measure_nothing_are_refused(hpcdecode):
    for flag, value in (("--copies", 1), ("--balance", 0)):
        result = hpcdecode("bench", "routes", flag, value)
        assert result.returncode == 2 and f"{flag}: expected" in result.stderr
