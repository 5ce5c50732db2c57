"""Facts that a rank finds out about itself: its place, memory, instruction sets and libraries."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from hpcdecode import _attn_cpu
from hpcdecode.attention import base as attention
from hpcdecode.attention import cuda as attention_cuda
from hpcdecode.ranks.roles import Rank
from hpcdecode.report.metrics import versions
from hpcdecode.system import cgroup
from hpcdecode.system.bandwidth import probe
from hpcdecode.system.cgroup import listed, read
from hpcdecode.system.cores import nodes_of
from hpcdecode.system.memory import available_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

_PASSES = 5
_MEBIBYTES = 256, 64  # size of the probe, at least and per thread; more than the caches hold


class MemoryFacts(msgspec.Struct, kw_only=True):
    """Measurements of an R-rank's memory. Shares are of the bytes touched, or -1 if the system does not tell.

    Attributes:
        read_gbps: Read bandwidth in GB/s, by number of threads.
        huge: Share in huge pages.
        local: Share on the NUMA nodes of the rank's cores.
    """

    read_gbps: dict[int, float]
    huge: float
    local: float


class Place(msgspec.Struct, kw_only=True):
    """Where a rank runs, as a launcher bound it.

    Attributes:
        rank: The rank, with role and cores as `generate` assigns them.
        cpus: CPUs that the process was started with.
        host_cpus: Number of CPUs that the job has on this host.
        host_nodes: Number of NUMA nodes of this host.
        launcher: Program that started the process; empty if there is none.
    """

    rank: Rank
    cpus: list[int]
    host_cpus: int
    host_nodes: int
    launcher: str


class RankFacts(Place, kw_only=True):
    """All facts of one rank.

    Attributes:
        cpu_quota: CPUs whose time the control group allows; None for no limit.
        huge_pages: Mode of transparent huge pages; empty if the system has none.
        memory: Measurements of an R-rank; None for other ranks.
        available: Bytes that the process may still take.
        built_isas: Instruction sets that attention kernels were built for.
        supported_isas: Those of them that this CPU has.
        untested_isas: Those of them that were tested under an emulator only.
        gpu_attention: Whether attention kernels for GPUs were built.
        mpi: Library, thread level and abilities of MPI.
        versions: Versions of the software.
    """

    cpu_quota: float | None
    huge_pages: str
    memory: MemoryFacts | None
    available: int
    built_isas: list[str]
    supported_isas: list[str]
    untested_isas: list[str]
    gpu_attention: str
    mpi: str
    versions: dict[str, str]


def place(rank: Rank, given: Iterable[int]) -> Place:
    """Return where `rank` runs. given: CPUs that the process was started with."""
    return Place(
        rank=rank,
        cpus=sorted(given),
        host_cpus=int(os.environ.get("SLURM_CPUS_ON_NODE") or len(cgroup.cpus()) or os.cpu_count() or 1),
        host_nodes=len(listed(read("/sys/devices/system/node/online"))) or 1,
        launcher=_launcher(),
    )


def examine(rank: Rank, comm: MPI.Intracomm | None, given: Iterable[int]) -> RankFacts:
    """Return all facts of `rank`; on an R-rank this takes about a second. given: as in `place`."""
    if rank.has_r:
        rank.isa = attention.isa()
    available = available_bytes()
    return RankFacts(
        **msgspec.structs.asdict(place(rank, given)),
        cpu_quota=cgroup.cpu_quota(),
        huge_pages=_bracketed(read("/sys/kernel/mm/transparent_hugepage/enabled")),
        memory=_measure(rank, available) if rank.has_r else None,
        available=available,
        built_isas=_attn_cpu.built_isas(),
        supported_isas=_attn_cpu.supported_isas(),
        untested_isas=_attn_cpu.untested_isas(),
        gpu_attention=attention_cuda.state(),
        mpi=_mpi(comm),
        versions=versions(),
    )


def _measure(rank: Rank, available: int) -> MemoryFacts:
    """Measure read bandwidth on one thread and on all, pinned as for attention, and where the memory lies."""
    cpus = rank.cpus if rank.pinned else []
    most = available >> 23  # an eighth in MiB, since other ranks of the host measure, too
    rates = {}
    for threads in sorted({1, rank.threads}):
        least, each = _MEBIBYTES
        reader = probe(threads, cpus[:threads], max(min(max(least, each * threads), most), 1))
        rates[threads] = round(reader.bytes / statistics.median(reader.seconds() for _ in range(_PASSES)) / 1e9, 1)
        huge, local = _huge_share(reader), _local_share(reader, set(nodes_of(rank.cpus)))
    return MemoryFacts(read_gbps=rates, huge=huge, local=local)


def _huge_share(reader: _attn_cpu.ReadProbe) -> float:
    """Return the share in huge pages of the resident bytes of the probe's buffer."""
    resident = huge = 0
    inside = False
    for line in read("/proc/self/smaps").splitlines():
        name, _, rest = line.partition(" ")
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", name):
            start = int(name.split("-")[0], 16)
            inside = reader.address <= start < reader.address + reader.bytes
        elif inside and name == "Rss:":
            resident += int(rest.split()[0])
        elif inside and name == "AnonHugePages:":
            huge += int(rest.split()[0])
    return huge / resident if resident else -1.0


def _local_share(reader: _attn_cpu.ReadProbe, nodes: set[int]) -> float:
    """Return the share on `nodes` of the pages of the probe's buffer."""
    pages = local = 0
    for line in read("/proc/self/numa_maps").splitlines():
        if not reader.address <= int(line.split()[0], 16) < reader.address + reader.bytes:
            continue
        for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
            pages += int(count)
            local += int(count) * (int(node) in nodes)
    return local / pages if pages and nodes else -1.0


def _bracketed(text: str) -> str:
    """Return the word in brackets: `always [madvise] never` gives `madvise`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _mpi(comm: MPI.Intracomm | None) -> str:
    if comm is None:
        return "not used"
    from mpi4py import MPI

    from hpcdecode.mpi import ulfm
    from hpcdecode.mpi.gpu import takes_cuda_memory

    levels = {getattr(MPI, f"THREAD_{name}"): name.lower() for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    library = re.split(r"[\n\0,]", MPI.Get_library_version())[0].replace("Version:", "")
    takes = "takes" if takes_cuda_memory() else "does not take"
    survives = "can" if ulfm.problem() is None else "cannot"
    level = levels[MPI.Query_thread()]
    return f"{' '.join(library.split())}, thread level {level}, {survives} --survive lost ranks, {takes} memory of GPUs"


def _launcher() -> str:
    """Return the program that started this process, by the variables that only it sets."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "mpirun"  # Open MPI
    if "MPI_LOCALNRANKS" in os.environ:
        return "mpiexec"  # MPICH
    return "srun" if "SLURM_STEP_NUM_TASKS" in os.environ else ""
