"""Start and end of a world: from the processes of a launcher to a team of ranks."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import msgspec

from hpcdecode.errors import InvariantViolation, RankLost, UserError
from hpcdecode.mpi.gpu import takes_cuda_memory
from hpcdecode.ranks.roles import Rank, assign
from hpcdecode.system.cores import arranged, nodes_of

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
logger = logging.getLogger(__name__)

# mpiexec (Hydra, PRTE, Open MPI) and srun with a PMI plug-in set these for the ranks.
_LAUNCHERS = ("PMI_SIZE", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PALS_RANKID", "MPI_LOCALNRANKS")

# Variables in which the launchers say how many processes they started.
_COUNTS = {"srun": ("SLURM_STEP_NUM_TASKS",), "mpiexec": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")}

_SHARED_MEMORY = "/dev/shm"
_LITTLE_SHARED = 16 << 20  # bytes; with less than 8 MiB MPI_Init of MPICH ends 3 ranks by a bus error
_LEAVE_SECONDS = 2.0
_SPEAK_SECONDS = 0.3
_WAIT_FOR_END_SECONDS = 10.0


def connect() -> MPI.Intracomm | None:
    """Return COMM_WORLD if a launcher started this process as one of several ranks, else None."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return None
    from mpi4py import MPI

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
            finding = f"{free >> 20}M of shared memory ({_SHARED_MEMORY}) are free"
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
        status = os.statvfs(_SHARED_MEMORY)
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


class Team:
    """The ranks of a job, and this rank's place among them.

    Attributes:
        comm: Communicator of the ranks; None if there is only one.
        ranks: All ranks, in the order of `comm`.
        place: Position of this rank in `ranks`.
        me: This rank.
        s_ranks: Positions of the ranks with role S.
        r_ranks: Positions of the ranks with role R.
    """

    def __init__(self, comm: MPI.Intracomm | None, ranks: list[Rank]):
        self.comm, self.ranks = comm, ranks
        self.place = comm.rank if comm else 0
        self.me = ranks[self.place]
        self.s_ranks = [place for place, r in enumerate(ranks) if r.has_s]
        self.r_ranks = [place for place, r in enumerate(ranks) if r.has_r]

    @property
    def lead(self) -> bool:
        """Whether this is the first S-rank, which reads the prompts and writes the results."""
        return self.place == self.s_ranks[0]

    def pin(self) -> None:
        """Bind this process to its cores, if it has cores of its own."""
        if self.me.pinned:
            os.sched_setaffinity(0, self.me.cpus)

    def broadcast(self, value: T | None, kind: type[T]) -> T:
        """Return the lead's `value` on every rank, as msgspec type `kind`; the others may pass None."""
        return broadcast(self.comm, value, kind, self.s_ranks[0])

    def gather_all(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks, in the order of `ranks`, on every rank."""
        return gather_all(self.comm, value, kind)


def assemble(
    comm: MPI.Intracomm | None, s_ranks: int | None, device: str | None = "cpu", r_device: str = "cpu"
) -> Team:
    """Give every rank its role, devices and cores. Collective over `comm`.

    Args:
        comm: The world; None for a single process.
        s_ranks: Number of S-ranks; None chooses.
        device: Device of S-ranks, `cpu` or `cuda`; None chooses.
        r_device: Device of R-ranks, `cpu`, `cuda` or `auto`.

    Raises:
        UserError: If the world does not have what is asked for.
    """
    me = Rank(
        rank=comm.rank if comm else 0,
        host=socket.gethostname(),
        cpus=arranged(os.sched_getaffinity(0)),
        gpus=_visible_gpus(),
        gpu_mpi=comm is not None and takes_cuda_memory(),
    )
    ranks = gather_all(comm, me, Rank)
    assign(ranks, s_ranks, device, r_device)
    team = Team(comm, ranks)
    if comm is not None:
        from hpcdecode.mpi.wait import Backoff

        Backoff.own_cores = team.me.pinned
    team.me.numa = ",".join(map(str, sorted(set(nodes_of(team.me.cpus))))) or "-"
    return team


def survivors(team: Team) -> Team:
    """Return the remaining ranks of a team as a team with the same roles, after `ulfm.unless_lost` has returned None.

    Raises:
        RankLost: On one rank, if an S-rank is lost or no R-rank remains.
    """
    from hpcdecode.mpi import ulfm

    assert team.comm is not None, "a single process has no ranks to lose"
    comm, places = ulfm.shrunk(team.comm)
    left = Team(comm, [team.ranks[place] for place in places])
    if len(left.s_ranks) == len(team.s_ranks) and left.r_ranks:
        return left
    if left.place != (left.s_ranks[0] if left.s_ranks else 0):
        time.sleep(_WAIT_FOR_END_SECONDS)
        end_all(comm)
    lost = named(rank for place, rank in enumerate(team.ranks) if place not in places)
    raise RankLost(f"{lost} lost, and {'no R-rank' if not left.r_ranks else 'not every S-rank'} is left")


def named(ranks: Iterable[Rank]) -> str:
    """Return the ranks as text, such as `rank 2 (R) on node17`."""
    return ", ".join(f"rank {r.rank} ({r.role}) on {r.host}" for r in ranks)


def _visible_gpus() -> list[str]:
    import torch

    numbers = range(torch.cuda.device_count())
    try:
        return [str(torch.cuda.get_device_properties(i).uuid) for i in numbers]
    except (AttributeError, RuntimeError):  # a driver without UUIDs; all ranks are taken to see the same GPUs
        return list(map(str, numbers))


def broadcast(comm: MPI.Intracomm | None, value: T | None, kind: type[T], root: int = 0) -> T:
    """Return the `value` of rank `root` on every rank, as msgspec type `kind`; wait without using a core."""
    if comm is None:
        return cast(T, value)  # the only rank is the root, which passes a value
    import numpy as np

    from hpcdecode.mpi.wait import wait

    data = msgspec.msgpack.encode(value) if comm.rank == root else b""
    length = np.array([len(data)], np.int64)
    wait(comm.Ibcast(length, root))
    wire = np.frombuffer(bytearray(data or int(length[0])), np.uint8)
    wait(comm.Ibcast(wire, root))
    return msgspec.msgpack.decode(wire.tobytes(), type=kind)


def gather_all(comm: MPI.Intracomm | None, value: T, kind: type[T]) -> list[T]:
    """Return the values of all ranks of `comm`, by rank, on every rank, as msgspec type `kind`."""
    if comm is None:
        return [value]
    return [broadcast(comm, value, kind, root) for root in range(comm.size)]


def is_lead() -> bool:
    """Return whether this process prints for all, as far as the launcher's variables tell."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


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
        ctypes.PyDLL(None).exit(code)  # the exit handlers of MPICH report to its launcher
    os._exit(code)


def _finalize(comm: MPI.Intracomm) -> bool:
    """Finalize MPI together with all ranks; return True without that if some are lost, for which it would wait."""
    from mpi4py import MPI

    from hpcdecode.mpi import ulfm

    if ulfm.lost(comm):
        ulfm.agreed(comm, True)
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
