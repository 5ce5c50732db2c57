"""Run by `mpiexec --with-ft ulfm`: rank 1 ends while the others make communicators with it; they say `LOST [1]`."""

from __future__ import annotations

import os
import signal

import mpi4py

mpi4py.rc.finalize = False  # it would wait for the lost rank
from mpi4py import MPI  # noqa: E402

from hpcdecode.exchange.communicators import communicators  # noqa: E402
from hpcdecode.mpi import ulfm  # noqa: E402

GROUPS = [[1, 2, 3], [0, 2, 3], [0, 1], [2, 3]]


def create() -> bool:
    for round in range(6):
        if WORLD.rank == 1 and round == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        for comm in communicators(WORLD, GROUPS):
            comm.Free()
    return True


WORLD = MPI.Intracomm(MPI.COMM_WORLD.Dup())
WORLD.Set_errhandler(MPI.ERRORS_RETURN)
outcome = ulfm.together(WORLD, [], create)
assert not outcome.whole
left, places = ulfm.shrunk(WORLD)
print("LOST", sorted(set(range(WORLD.size)) - set(places)), flush=True)
ulfm.agreed(left, done=True)
os._exit(0)
