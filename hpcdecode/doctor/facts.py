"""What a rank finds out about itself: its place, its memory, its instruction sets, its libraries."""

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
_MEBIBYTES = 256, 64  # of the probe: at least, and for every thread; more than the caches hold


class MemoryFacts(msgspec.Struct, kw_only=True):
    """How the memory of an R-rank behaves. Shares are of the bytes touched, -1 where the system does not tell."""

    read_gbps: dict[int, float]  # GB/s by number of threads
    huge: float  # share in huge pages
    local: float  # share on the NUMA nodes of the rank's cores


class Place(msgspec.Struct, kw_only=True):
    """Where a rank runs, as a launcher bound it. `rank` is what `generate` makes of it."""

    rank: Rank
    cpus: list[int]  # that the process was given
    host_cpus: int  # that the job has on this host
    host_nodes: int
    launcher: str


class RankFacts(Place, kw_only=True):
    """All of one rank."""

    cpu_quota: float | None  # CPUs' worth of time
    huge_pages: str  # mode of transparent huge pages; empty: none
    memory: MemoryFacts | None  # None: not an R-rank
    available: int  # bytes
    built_isas: list[str]
    supported_isas: list[str]
    untested_isas: list[str]  # built, and tested under an emulator only
    gpu_attention: str  # whether it was built
    mpi: str
    versions: dict[str, str]


def place(rank: Rank, given: Iterable[int]) -> Place:
    """Find out. `given`: the CPUs that the process was started with."""
    return Place(
        rank=rank,
        cpus=sorted(given),
        host_cpus=int(os.environ.get("SLURM_CPUS_ON_NODE") or len(cgroup.cpus()) or os.cpu_count() or 1),
        host_nodes=len(listed(read("/sys/devices/system/node/online"))) or 1,
        launcher=_launcher(),
    )


def examine(rank: Rank, comm: MPI.Intracomm | None, given: Iterable[int]) -> RankFacts:
    """As `place`, and more. R-ranks measure for about a second."""
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
    """Read bandwidth on one thread and on all of them, pinned as the R-part's; and where the memory came from."""
    cpus = rank.cpus if rank.pinned else []
    most = available >> 23  # an eighth: other ranks of the host measure, too
    rates = {}
    for threads in sorted({1, rank.threads}):
        least, each = _MEBIBYTES
        reader = probe(threads, cpus[:threads], max(min(max(least, each * threads), most), 1))
        rates[threads] = round(reader.bytes / statistics.median(reader.seconds() for _ in range(_PASSES)) / 1e9, 1)
        huge, local = _huge_share(reader), _local_share(reader, set(nodes_of(rank.cpus)))
    return MemoryFacts(read_gbps=rates, huge=huge, local=local)


def _huge_share(reader: _attn_cpu.ReadProbe) -> float:
    """Of the resident bytes of the probe's buffer, those in huge pages."""
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
    """Of the pages of the probe's buffer, those on `nodes`."""
    pages = local = 0
    for line in read("/proc/self/numa_maps").splitlines():
        if not reader.address <= int(line.split()[0], 16) < reader.address + reader.bytes:
            continue
        for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
            pages += int(count)
            local += int(count) * (int(node) in nodes)
    return local / pages if pages and nodes else -1.0


def _bracketed(text: str) -> str:
    """The mode in force: `always [madvise] never` -> `madvise`."""
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
    """Which program started this process, by the variables that only it sets."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "mpirun"  # Open MPI
    if "MPI_LOCALNRANKS" in os.environ:
        return "mpiexec"  # MPICH
    return "srun" if "SLURM_STEP_NUM_TASKS" in os.environ else ""
