"""Start and end of a world: what a launcher has set up, and how its processes leave."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from hpcdecode.errors import InvariantViolation, RankLost, UserError
from hpcdecode.mpi import mpich
from hpcdecode.system.gpus import await_gpus

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

logger = logging.getLogger(__name__)

# mpiexec (Hydra, PRTE, Open MPI) and srun with a PMI plug-in set these for the ranks.
_LAUNCHERS = ("PMI_SIZE", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PALS_RANKID", "MPI_LOCALNRANKS")

# Variables in which the launchers say how many processes they started.
_COUNTS = {"srun": ("SLURM_STEP_NUM_TASKS",), "mpiexec": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")}

_LITTLE_SHARED = 16 << 20  # bytes; with less than 8 MiB MPI_Init of MPICH ends 3 ranks by a bus error
_LEAVE_SECONDS = 2.0
_SPEAK_SECONDS = 0.3


def connect() -> MPI.Intracomm | None:
    """Return COMM_WORLD if a launcher started this process as one of several ranks, else None."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return None
    mpich.prepare()
    from mpi4py import MPI

    mpich.unlink_segments()
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def started() -> int:
    """Return how many ranks the launcher started, by its variables; 2 if it started some and does not say how many."""
    unknown = 2 if any(name in os.environ for name in _LAUNCHERS) else 1
    return max(map(_count, _COUNTS)) or unknown


def _count(launcher: str) -> int:
    """Return how many processes `launcher` started, by its variables; 0 if they are not set."""
    return max(int(os.environ.get(name, "0")) for name in _COUNTS[launcher])


def world() -> MPI.Intracomm | None:
    """Return what `connect` returns, after checks of what the launcher has set up.

    Raises:
        UserError: If a launcher started several processes and MPI sees each of them as a world of its own.
    """
    if started() > 1 and (free := _shared_memory()) < _LITTLE_SHARED:
        if is_lead():
            finding = f"{free >> 20}M of shared memory ({mpich.SHARED_MEMORY}) are free"
            logger.warning(f"hpcdecode: {finding}: MPI may end with a bus error; enlarge it")
        time.sleep(_SPEAK_SECONDS)
    comm = connect()
    if comm is None and (problem := fallen_apart()):
        finding, remedy = problem
        raise UserError(f"{finding}: {remedy}", everywhere=True)
    return comm


def _shared_memory() -> int:
    """Return the bytes of shared memory that are free on this host."""
    try:
        status = os.statvfs(mpich.SHARED_MEMORY)
    except OSError:
        return _LITTLE_SHARED
    return status.f_bavail * status.f_frsize


def fallen_apart() -> tuple[str, str] | None:
    """Return finding and remedy if a launcher started several processes and MPI sees a world of 1, else None."""
    for launcher in _COUNTS:
        if (count := _count(launcher)) > 1:
            remedy = (
                "use srun --mpi=pmi2 with MPICH, srun --mpi=pmix with Open MPI (srun --mpi=list shows what there is)"
                if launcher == "srun"
                else "use the mpiexec that belongs to the MPI library which mpi4py opens, or name the library of "
                "this mpiexec with MPI4PY_LIBMPI"
            )
            return f"{launcher} started {count} processes, but MPI sees a world of 1", remedy
    return None


def is_lead() -> bool:
    """Return whether this process prints for all, as far as the launcher's variables tell."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


def lead_first(comm: MPI.Intracomm | None, make: Callable[[], T]) -> T:
    """Return what `make` returns on this rank; the lead calls it first, such as to fetch what others then find.

    An error that only the lead has ends it before other ranks call `make`.
    """
    if comm is None:
        return make()
    from hpcdecode.mpi.wait import wait

    if comm.rank:
        wait(comm.Ibarrier())
        return make()
    try:
        made = make()
    except UserError as error:
        if error.everywhere:
            wait(comm.Ibarrier())
        raise
    wait(comm.Ibarrier())
    return made


def leave(comm: MPI.Intracomm | None, code: int) -> int:
    """Return the exit code `code` of a single process; end the process of a rank, since ending Python takes long.

    A bad code waits until other ranks have ended, because launchers kill the remaining ranks and report them as killed.
    At the end of a job all ranks but one have exit code 0.
    """
    survived = comm is not None and _finalize(comm)
    if code and started() > 1:
        time.sleep(_LEAVE_SECONDS)
    if comm is None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    if not survived:
        await_gpus()  # exit handlers end what computes there
        ctypes.PyDLL(None).exit(code)  # the exit handlers of MPICH report to its launcher
    os._exit(code)


def _finalize(comm: MPI.Intracomm) -> bool:
    """Finalize MPI together with all ranks; return True without that if some are lost, for which it would wait."""
    from mpi4py import MPI

    from hpcdecode.mpi import ulfm

    if ulfm.lost(comm):
        ulfm.agreed(comm, done=True)
        return True
    MPI.Finalize()
    return False


def abort(comm: MPI.Intracomm | None, error: BaseException, code: int = 1) -> NoReturn:
    """End all ranks at once, with a message that names this rank, its host and the cause."""
    expected = isinstance(error, (UserError, RankLost, InvariantViolation))
    if not expected:
        last_words("".join(traceback.format_exception(error)).rstrip("\n"))
    rank = comm.rank if comm else 0
    cause = str(error) if expected else f"{type(error).__name__}: {error}"
    last_words(f"hpcdecode: rank {rank} on {socket.gethostname()} failed: {cause}")
    if comm is not None:
        end_all(comm, code)
    raise SystemExit(code)


def last_words(text: str) -> None:
    """Log why the process is about to be ended; print it if no logging is set up, so that it never ends silently."""
    logger.error(text)
    if not logging.getLogger().handlers:
        print(text, file=sys.stderr, flush=True)


def end_all(comm: MPI.Intracomm | None, code: int = 1) -> NoReturn:
    """End all ranks at once, from any thread, after a moment in which launchers pass on the output."""
    if comm is not None:
        time.sleep(_SPEAK_SECONDS)
        if not _alone(comm):
            comm.Abort(code)
    os._exit(code)


def _alone(comm: MPI.Intracomm) -> bool:
    """Return whether all other ranks are lost, where mpiexec of Open MPI would report an abort as success."""
    from hpcdecode.mpi import ulfm

    return len(ulfm.lost(comm)) == comm.size - 1
