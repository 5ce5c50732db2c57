"""Faults of MPICH's start, kept from doing harm.

With UCX, MPICH publishes the 4,096 bytes that begin at its network address, so whatever lies behind it on the heap
(`MPIDI_UCX_comm_addr_exchange`). It shortens runs of zeros; with other bytes the line is longer than the 1,024 bytes
that Slurm reads, Slurm says "mpi/pmi2: value not properly terminated in client request", and the ranks wait for ever.
A library of ours (native/mpi/ucp_address.cpp) gives it addresses that end in zeros.

The shared memory of a node's ranks has a name until they end (`MPIDI_POSIX_comm_bootstrap`), so ranks that are killed
leave it behind. Under `srun --mpi=pmi2` the name is that of job and step: a job that was killed and requeued would take
the old contents for its own.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_SEGMENT = f"{SHARED_MEMORY}/mpich_"
_SLURM = ("PMI_FD", "PMI_JOBID", "SLURM_STEP_ID")  # set for the tasks of srun --mpi=pmi2
_FNV_OFFSET, _FNV_PRIME = 2166136261, 16777619


def prepare() -> None:
    """Call this before MPI is initialised; it does nothing in processes that `srun --mpi=pmi2` did not start."""
    if all(name in os.environ for name in _SLURM):
        _remove_stale_segments(os.environ["PMI_JOBID"])
        library = find_spec("hpcdecode._ucp_address")
        if library and library.origin:
            ctypes.CDLL(library.origin, mode=os.RTLD_GLOBAL | os.RTLD_NOW)


def unlink_segments() -> None:
    """Remove the names of MPI's shared memory, which all ranks of a node have mapped when MPI is initialised."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in maps if _SEGMENT in line}:
        with suppress(OSError):  # another rank was first
            os.unlink(path)


def segment_names(step: str) -> list[str]:
    """Return how the names begin that MPICH gives to shared memory of the ranks of a step, such as `12.0`, of Slurm."""
    worlds = (_hash(name) for name in (step, f"{step}-1"))  # of MPICH 5.0, and of later versions
    return [f"mpich_{kind}_{world:x}_" for world in worlds for kind in ("shm", "vci")]


def _hash(name: str) -> int:
    """Return the hash FNV-1a of 32 bits."""
    value = _FNV_OFFSET
    for byte in name.encode():
        value = (value ^ byte) * _FNV_PRIME % 2**32
    return value


def _remove_stale_segments(step: str) -> None:
    """Remove shared memory of this step's name that is older than the step: of a run that was killed and requeued."""
    stale = [path for name in segment_names(step) for path in SHARED_MEMORY.glob(f"{name}*")]
    began = _step_began() if stale else None
    if began is None:
        return
    for path in stale:
        try:
            if path.stat().st_mtime < began:
                path.unlink()
                logger.info(f"removed {path}, which an earlier run of this job left")
        except OSError:  # another rank was first, or it is another user's
            continue


def _step_began() -> float | None:
    """Return when Slurm started this step on this node, in s since the epoch; None if no ancestor is Slurm's."""
    pid = os.getppid()
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
        while pid > 1:
            name, fields = _process(pid)
            if name.startswith("slurmstepd"):
                return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
            pid = int(fields[1])
    except OSError:
        pass
    return None


def _process(pid: int) -> tuple[str, list[str]]:
    """Return name and the fields of /proc/PID/stat that follow it: 1 is the parent, 19 the start in ticks."""
    head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return head.partition("(")[2], rest.split()
