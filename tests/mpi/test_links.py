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


def test_rows_go_on_while_their_s_rank_waits_for_a_device(mpiexec, tmp_path, monkeypatch):
    """Where a message needs the sender's MPI again, as between hosts: no rank copies another's memory."""
    for name in ("CMA", "XPMEM"):
        monkeypatch.setenv(f"MPIR_CVAR_CH4_{name}_ENABLE", "0")
    result = mpiexec(2, "tests/mpi/run_progress.py", tmp_path / "there", timeout=100)
    assert result.returncode == 0 and "PROGRESS ok" in result.stdout, result.stderr[-3000:]
