"""`bench exchange` and `bench pipeline` verify, measure and print; in a world of 1 they say how to be started."""

from __future__ import annotations

import json

import pytest

EXCHANGE = ("bench", "exchange", "--rows", 5, "--hidden", 1024, "--passes", 2, "--json")
SMALL = ("--model", "tiny", "--batch", 4, "--context", 40, "--steps", 3, "--passes", 2)
PIPELINE = ("bench", "pipeline", *SMALL, "--json")


@pytest.mark.parametrize(("line", "ranks"), [(EXCHANGE, 3), (PIPELINE, 2)])
def test_a_measurement_over_ranks(hpcdecode, tmp_path, line, ranks):
    hpcdecode.environment["XDG_CACHE_HOME"] = str(tmp_path)
    result = hpcdecode(*line, ranks=ranks)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["bench"] == line[1] and found["cases"]
    for case in found["cases"]:
        assert case.keys() == {"case", "value", "unit", "reference", "ratio", "spread"}
    steps = {c["case"]: c["value"] for c in found["cases"] if c["unit"] == "ms"}
    assert all(value > 0 for value in steps.values())


@pytest.mark.parametrize("line", [EXCHANGE, PIPELINE])
def test_one_process_is_refused(hpcdecode, line):
    result = hpcdecode(*line)
    assert result.returncode == 2 and "mpiexec -n" in result.stderr
