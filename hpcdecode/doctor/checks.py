"""Checks of a world: what may be wrong, and what to do about it. Each check takes the facts of all ranks, by rank.

To add a check, write a function that yields Problems and add it to CHECKS.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from hpcdecode.doctor.facts import MemoryFacts, Place, RankFacts
from hpcdecode.ranks.launch import fallen_apart
from hpcdecode.ranks.roles import sharing_cores

_HUGE = 0.9  # least share of the memory in huge pages
_LOCAL = 0.95  # least share of the memory on the rank's own NUMA nodes
_SLOW = 0.7  # least share of the ranks' median bandwidth
_LITTLE = 1 << 30  # least bytes for a KV cache
K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound=Place)


class Problem(msgspec.Struct, kw_only=True):
    """A problem of some ranks.

    Attributes:
        check: Name of the check that found it.
        ranks: Ranks that have it.
        finding: What is wrong.
        remedy: What to do.
    """

    check: str
    ranks: list[int]
    finding: str
    remedy: str


World = Sequence[RankFacts]
Places = Sequence[Place]


def world(ranks: World) -> Iterator[Problem]:
    """Check that the processes of one launch are one MPI world."""
    found = fallen_apart() if len(ranks) == 1 else None
    if found:
        yield Problem(check="world", ranks=[0], finding=found[0], remedy=found[1])


def same_software(ranks: World) -> Iterator[Problem]:
    """Check that all ranks run the same versions, so that protocol and rounding agree."""
    groups = _group(ranks, lambda f: (f.mpi, *sorted(f.versions.items())))
    if len(groups) > 1:
        odd = min(groups.values(), key=len)
        yield _problem(
            "versions",
            odd,
            "these ranks run other versions of Python, its packages or MPI than the others",
            "start all ranks from one environment, on a file system that every host sees",
        )


def numa(ranks: Places) -> Iterator[Problem]:
    """Check that the cores of an R-rank lie on one NUMA node."""
    spanning = [f for f in ranks if f.rank.has_r and "," in f.rank.numa]
    if not spanning:
        return
    nodes = max(f.host_nodes for f in spanning)
    remedy = _by_launcher(
        spanning,
        srun=f"srun --ntasks-per-node={nodes} --cpu-bind=ldoms",
        mpiexec=f"mpiexec -ppn {nodes} -bind-to numa",
        mpirun="mpirun --map-by numa --bind-to numa",
        none=f"start one rank per NUMA node, such as mpiexec -n {nodes} -bind-to numa",
    )
    yield _problem("numa", spanning, f"R-ranks span NUMA nodes ({spanning[0].rank.numa})", remedy)


def own_cores(ranks: Places) -> Iterator[Problem]:
    """Check that no core works for two ranks."""
    sharing = sharing_cores(f.rank for f in ranks)
    if sharing:
        of = [f for f in ranks if f.rank.rank in sharing]
        own = _by_launcher(
            of,
            srun="srun --cpus-per-task=C --cpu-bind=cores",
            mpiexec="mpiexec -bind-to core:C",
            mpirun="mpirun --map-by slot:PE=C --bind-to core",
        )
        finding = "these ranks share cores with others of their machine, and wait for each other"
        yield _problem("cores", of, finding, f"start fewer ranks there, or give each C cores of its own: {own}")


def all_cores(ranks: Places) -> Iterator[Problem]:
    """Check that the ranks of a host use most cores that the job has there."""
    for host, members in _group(ranks, lambda f: f.rank.host).items():
        used = len(set().union(*(f.cpus for f in members)))
        if members[0].launcher and 2 * used <= members[0].host_cpus:
            remedy = _by_launcher(
                members,
                srun="srun --cpus-per-task=C (srun does not take it over from sbatch)",
                mpiexec="mpiexec -bind-to numa",
                mpirun="mpirun --map-by numa --bind-to numa",
            )
            finding = f"only {used} of the job's {members[0].host_cpus} CPUs on {host} are used"
            yield _problem("idle cores", members, finding, f"give the ranks more: {remedy}")


def quota(ranks: World) -> Iterator[Problem]:
    """Check that the control group of a host allows as much CPU time as the ranks' cores have."""
    for host, members in _group(ranks, lambda f: f.rank.host).items():
        cpus = len(set().union(*(f.cpus for f in members)))
        least = min((f.cpu_quota for f in members if f.cpu_quota is not None), default=cpus)
        if least < cpus:
            yield _problem(
                "quota",
                members,
                f"the control group on {host} allows {least:g} CPUs' worth of time for {cpus} CPUs: threads will stall",
                f"raise the container's CPU limit to {cpus}, or restrict the process to {max(int(least), 1)} CPUs",
            )


def huge_pages(ranks: World) -> Iterator[Problem]:
    """Check that the KV cache gets huge pages."""
    measured = _measured(ranks)
    off = [f for f, _ in measured if f.huge_pages in ("", "never")]
    if off:
        yield _problem(
            "huge pages",
            off,
            "transparent huge pages are off: reading memory may take twice as long",
            "ask for `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` on these hosts",
        )
    few = [(f, memory.huge) for f, memory in measured if f not in off and 0 <= memory.huge < _HUGE]
    if few:
        yield _problem(
            "huge pages",
            [f for f, _ in few],
            f"only {min(share for _, share in few):.0%} of the memory asked for came in huge pages: memory is "
            "scattered or short",
            "free memory on these hosts, or ask for `echo 1 > /proc/sys/vm/compact_memory` before the job",
        )


def gpus(ranks: World) -> Iterator[Problem]:
    """Check that the driver of GPUs runs what torch was built with."""
    for trouble, troubled in _group([f for f in ranks if f.rank.gpu_trouble], lambda f: f.rank.gpu_trouble).items():
        remedy = "update the driver, or install a torch that was built with a CUDA toolkit that it knows"
        yield _problem("GPUs", troubled, f"these ranks cannot use their GPUs: {trouble}", remedy)


def local_memory(ranks: World) -> Iterator[Problem]:
    """Check that the memory of an R-rank lies on the NUMA nodes of its cores."""
    far = [(f, memory.local) for f, memory in _measured(ranks) if 0 <= memory.local < _LOCAL]
    if far:
        yield _problem(
            "local memory",
            [f for f, _ in far],
            f"only {min(share for _, share in far):.0%} of the memory asked for lies on the ranks' own NUMA nodes",
            "let the ranks use the memory of their nodes (srun --mem-bind=local, no numactl --membind elsewhere), and "
            "free it from others' data",
        )


def isa(ranks: World) -> Iterator[Problem]:
    """Check that all R-ranks use vector instructions, and the same ones."""
    measured = [f for f in ranks if f.rank.has_r]
    plain = [f for f in measured if f.rank.isa == "generic"]
    if plain:
        yield _problem(
            "ISA",
            plain,
            "attention runs on the generic kernels, several times slower than AVX2",
            "unset HPCDECODE_ISA"
            if any(len(f.supported_isas) > 1 for f in plain)
            else "run the R-ranks on CPUs with AVX2 or AVX-512",
        )
    groups = _group([f for f in measured if f not in plain], lambda f: f.rank.isa)
    if len(groups) > 1:
        common = [i for i in measured[0].supported_isas if all(i in f.supported_isas for f in measured)]
        yield _problem(
            "ISA",
            min(groups.values(), key=len),
            f"R-ranks differ ({', '.join(sorted(groups))}): a sequence's tokens may depend on which rank holds it",
            f"set HPCDECODE_ISA={common[-1]} for all ranks",
        )


def bandwidth(ranks: World) -> Iterator[Problem]:
    """Check that no R-rank is much slower than the others, because each step waits for the slowest."""
    rates = {f.rank.rank: max(memory.read_gbps.values()) for f, memory in _measured(ranks)}
    if not rates:
        return
    middle = statistics.median(rates.values())
    slow = [f for f in ranks if rates.get(f.rank.rank, middle) < _SLOW * middle]
    if slow:
        yield _problem(
            "bandwidth",
            slow,
            f"these R-ranks read memory at less than {_SLOW:.0%} of the ranks' median of {middle:.0f} GB/s",
            "see what else runs on their hosts, and that every rank has as many cores and memory channels",
        )


def memory(ranks: World) -> Iterator[Problem]:
    """Check that R-ranks have memory for a KV cache."""
    short = [f for f in ranks if f.rank.has_r and f.available < _LITTLE]
    if short:
        yield _problem(
            "memory",
            short,
            f"only {min(f.available for f in short) >> 20} MiB are free for these R-ranks",
            "ask for more (srun --mem=0 takes all of a host), or end what else uses it",
        )


BINDING: tuple[Callable[[Places], Iterator[Problem]], ...] = (numa, own_cores, all_cores)  # checked by every job
CHECKS: tuple[Callable[[World], Iterator[Problem]], ...] = (
    world,
    same_software,
    *BINDING,
    quota,
    huge_pages,
    local_memory,
    gpus,
    isa,
    bandwidth,
    memory,
)


def _measured(ranks: World) -> list[tuple[RankFacts, MemoryFacts]]:
    """Return the R-ranks, which have measured their memory, with what they found."""
    return [(f, f.memory) for f in ranks if f.memory is not None]


def _problem(check: str, of: Places, finding: str, remedy: str) -> Problem:
    return Problem(check=check, ranks=[f.rank.rank for f in of], finding=finding, remedy=remedy)


def _by_launcher(of: Places, *, srun: str, mpiexec: str, mpirun: str, none: str = "") -> str:
    return {"srun": srun, "mpiexec": mpiexec, "mpirun": mpirun}.get(of[0].launcher, none)


def _group(ranks: Iterable[P], key: Callable[[P], K]) -> dict[K, list[P]]:
    """Return the ranks by key."""
    groups: defaultdict[K, list[P]] = defaultdict(list)
    for f in ranks:
        groups[key(f)].append(f)
    return groups
