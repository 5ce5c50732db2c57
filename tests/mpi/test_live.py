"""Rows that come while several ranks work, in every kind of layout."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("ranks", "layouts"), [(3, ("split", "prefill", "replicas")), (2, ("tp2",))])
def test_rows_end_as_they_do_alone(mpiexec, checkpoint, ranks, layouts):
    done = mpiexec(ranks, "tests/mpi/run_live.py", checkpoint("llama3"), *layouts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"LIVE {layout} 60 rows, 0 differ" for layout in layouts]
