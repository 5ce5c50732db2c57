"""From processes to a world, and how it ends."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from hpcdecode.errors import InvariantViolation, RankLost, UserError
from hpcdecode.mpi.gpu import takes_cuda_memory
from hpcdecode.ranks.roles import Rank, assign
from hpcdecode.system.cores import arranged, nodes_of

if TYPE_CHECKING:
    from mpi4py import MPI

# Set for the ranks by mpiexec (Hydra, PRTE, Open MPI) and by srun with a PMI plug-in.
_LAUNCHERS = ("PMI_SIZE", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PALS_RANKID", "MPI_LOCALNRANKS")

# How many it started, by the launchers' own variables.
_COUNTS = {"srun": ("SLURM_STEP_NUM_TASKS",), "mpiexec": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")}

_SHARED_MEMORY = "/dev/shm"
_LITTLE_SHARED = 16 << 20  # bytes; MPICH dies of a bus error in MPI_Init where a world of 3 finds less than 8 MiB

_LEAVE_SECONDS = 2.0
_SPEAK_SECONDS = 0.3
_WAIT_FOR_END_SECONDS = 10.0


def connect() -> MPI.Intracomm | None:
    """COMM_WORLD if a launcher started this process as one rank of several, else None."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def started() -> int:
    """Ranks that the launcher started, by its variables; 2 where it does not say how many."""
    unknown = 2 if any(name in os.environ for name in _LAUNCHERS) else 1
    return max(map(_count, _COUNTS)) or unknown


def _count(launcher: str) -> int:
    """Processes that it started, by its variables; 0 where they are not there."""
    return max(int(os.environ.get(name, "0")) for name in _COUNTS[launcher])


def world() -> MPI.Intracomm | None:
    """As `connect`; UserError where a launcher started several ranks that MPI does not bring together."""
    if started() > 1 and (free := _shared_memory()) < _LITTLE_SHARED:
        if is_lead():
            room = f"{free >> 20}M of shared memory ({_SHARED_MEMORY}) are free"
            print(f"hpcdecode: {room}: MPI may end with a bus error; enlarge it", file=sys.stderr, flush=True)
        time.sleep(_SPEAK_SECONDS)
    comm = connect()
    if comm is None and (problem := fallen_apart()):
        finding, remedy = problem
        raise UserError(f"{finding}: {remedy}", everywhere=True)
    return comm


def _shared_memory() -> int:
    """Bytes of shared memory that are free on this host."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return _LITTLE_SHARED
    return status.f_bavail * status.f_frsize


def fallen_apart() -> tuple[str, str] | None:
    """What is wrong and what to do, for a world of 1 in which a launcher started several processes."""
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
    """The ranks of a job: all of them, and this one's place among them. `comm` is None where there is only one.

    place, s_ranks, r_ranks: in `ranks` and in `comm`.
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
        """Keep this process to its cores, if it has some of its own."""
        if self.me.pinned:
            os.sched_setaffinity(0, self.me.cpus)

    def broadcast(self, value, kind):
        """The lead's `value` on every rank, as msgspec type `kind`."""
        return broadcast(self.comm, value, kind, self.s_ranks[0])

    def gather_all(self, value, kind) -> list:
        """`value` of every rank, by rank, on every rank."""
        return gather_all(self.comm, value, kind)


def assemble(
    comm: MPI.Intracomm | None, s_ranks: int | None, device: str | None = "cpu", r_device: str = "cpu"
) -> Team:
    """Give every rank its role, devices and cores; UserError if the world cannot have what is asked for."""
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
    """What is left of a team whose loss `ulfm.unless_lost` has told, with the same roles.

    Raises RankLost, on one rank, where it cannot go on: an S-rank is among the lost, or no R-rank is left.
    """
    from hpcdecode.mpi import ulfm

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
    """Such as `rank 2 (R) on node17`."""
    return ", ".join(f"rank {r.rank} ({r.role}) on {r.host}" for r in ranks)


def _visible_gpus() -> list[str]:
    import torch

    numbers = range(torch.cuda.device_count())
    try:
        return [str(torch.cuda.get_device_properties(i).uuid) for i in numbers]
    except (AttributeError, RuntimeError):  # a driver that does not tell; ranks are taken to see the same ones
        return list(map(str, numbers))


def broadcast(comm: MPI.Intracomm | None, value, kind, root: int = 0):
    """`value` of rank `root` on every rank, as msgspec type `kind`; waits without burning a core."""
    if comm is None:
        return value
    import numpy as np

    from hpcdecode.mpi.wait import wait

    data = msgspec.msgpack.encode(value) if comm.rank == root else b""
    length = np.array([len(data)], np.int64)
    wait(comm.Ibcast(length, root))
    wire = np.frombuffer(bytearray(data or int(length[0])), np.uint8)
    wait(comm.Ibcast(wire, root))
    return msgspec.msgpack.decode(wire.tobytes(), type=kind)


def gather_all(comm: MPI.Intracomm | None, value, kind) -> list:
    """`value` of every rank, by rank, on every rank."""
    if comm is None:
        return [value]
    return [broadcast(comm, value, kind, root) for root in range(comm.size)]


def is_lead() -> bool:
    """Whether this process is the one that prints for all, as far as the launcher's variables tell."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


def leave(comm: MPI.Intracomm | None, code: int) -> int:
    """`code`, once other processes have had time to end: launchers that kill on bad exit report those left as killed.

    At the end of a job all ranks but one have exit code 0. Ranks of a world end here: taking Python down takes long.
    """
    survived = comm is not None and _part(comm)
    if code and started() > 1:
        time.sleep(_LEAVE_SECONDS)
    if comm is None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    if not survived:
        ctypes.PyDLL(None).exit(code)  # MPICH has yet to say goodbye to its launcher, which it does in there
    os._exit(code)


def _part(comm: MPI.Intracomm) -> bool:
    """Returns once all ranks have called it: whether some were lost; MPI is not finalized then, as it would wait."""
    from mpi4py import MPI

    from hpcdecode.mpi import ulfm

    if ulfm.lost(comm):
        ulfm.agreed(comm, True)
        return True
    MPI.Finalize()
    return False


def abort(comm: MPI.Intracomm | None, error: BaseException, code: int = 1) -> NoReturn:
    """End all ranks at once, naming this rank, its host and the cause."""
    expected = isinstance(error, (UserError, RankLost, InvariantViolation))
    if not expected:
        traceback.print_exception(error)
    rank = comm.rank if comm else 0
    cause = str(error) if expected else f"{type(error).__name__}: {error}"
    print(f"hpcdecode: rank {rank} on {socket.gethostname()} failed: {cause}", file=sys.stderr, flush=True)
    if comm is not None:
        end_all(comm, code)
    raise SystemExit(code)


def end_all(comm: MPI.Intracomm | None, code: int = 1) -> NoReturn:
    """End all ranks at once, from any thread, once what was printed is out."""
    if comm is not None:
        time.sleep(_SPEAK_SECONDS)  # launchers drop output that they have not passed on yet
        if not _alone(comm):
            comm.Abort(code)
    os._exit(code)


def _alone(comm: MPI.Intracomm) -> bool:
    """Whether all other ranks are lost: Open MPI's mpiexec would report an abort as success."""
    from hpcdecode.mpi import ulfm

    return len(ulfm.lost(comm)) == comm.size - 1
