"""A lane's links over MPI bring every row to its R-rank and back, by shared memory and by messages."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_go_to_their_r_rank_and_back(mpiexec, ranks):
    result = mpiexec(ranks, "tests/mpi/run_links.py", timeout=120)
    assert result.returncode == 0 and "LINKS ok" in result.stdout, result.stderr[-3000:]


def test_members_add_up_in_their_order(mpiexec):
    result = mpiexec(4, "tests/mpi/run_sums.py", timeout=120)
    assert result.returncode == 0 and "SUMS ok" in result.stdout, result.stderr[-3000:]
