"""A rank, its cores and its GPUs. Every rank of a world computes the same assignment from the same facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import msgspec

from hpcdecode.errors import UserError

_BESIDE_GPU = 4  # most cores of a rank that computes on a GPU, if other ranks of its host compute on cores
_NOWHERE = -1  # NUMA node that the system does not tell


class Rank(msgspec.Struct, kw_only=True):
    """One rank, as printed in the topology.

    Attributes:
        rank: Rank in the world at its start.
        host: Host name.
        machine: Boot of its kernel, the same in containers of a machine, whatever their host names; empty if unknown.
        cpus: CPUs that it may use.
        nodes: NUMA node of each of `cpus`; nothing if the system does not tell.
        gpus: GPUs that it sees, by names that are the same on all ranks of a host.
        gpu_nodes: NUMA node of each of these; -1 if the system does not tell.
        gpu_trouble: Why it cannot use GPUs, as the driver says; empty if it can, or if there are none.
        memory: Bytes that are free on its host at the start.
        weights: Bytes that the weights would take; 0 if they are not known here.
        shares_weights: Whether S-ranks of a NUMA node would have one copy of them.
        role: `S`, `R` or `SR`.
        home: Of an S-rank, the first member of its group, by its rank at the start; None if it is one.
        member: Number of an S-rank in its group; of an R-rank, number of the member, in each copy of the model, whose
            layers and heads it has.
        tp: S-ranks that share the layers of a stage.
        pp: Stages of a group.
        copies: Whole copies of the model in a group, which run the slices of a lane in turn.
        prefill: Whether all copies but the first only prefill, in place of turns.
        serves: Of an R-rank, the home of the group whose rows it holds, by its rank at the start; None for all groups.
        device: Device of the slices.
        kv_device: Device of the KV cache and its attention.
        threads: Threads that compute.
        pinned: Whether the threads are pinned to `cpus`.
        numa: NUMA nodes of `cpus`, as in 0,1.
        isa: Instruction set of the attention kernels.
        kv_tokens: Capacity of the KV cache.
        kv_windowed: Whether its sequences give up what leaves windows.
        kv_resident: Bytes of memory for its KV cache, the rest of which lies in tiers; 0 if all lies in memory.
        kv_resident_tokens: Tokens that this memory has room for.
        swap_chunks: Of its tiers for sequences that leave the KV cache; 0 without tiers.
        swap_chunk_tokens: Group tokens of such a chunk, as `attention.footprint` counts them.
        swap_rate: Tokens that it writes to its tiers, or reads, in a second; with `kv_resident`, that it reads.
        gpu_mpi: Whether its MPI takes the memory of GPUs.
        speed: Speed of attention relative to the slowest R-rank; 1 if R-ranks are alike.
    """

    rank: int
    host: str
    machine: str = ""
    cpus: list[int]
    nodes: list[int] = []
    gpus: list[str] = []
    gpu_nodes: list[int] = []
    gpu_trouble: str = ""
    memory: int = 0
    weights: int = 0
    shares_weights: bool = False
    role: str = ""
    home: int | None = None
    member: int = 0
    tp: int = 1
    pp: int = 1
    copies: int = 1
    prefill: bool = False
    serves: int | None = None
    device: str = "cpu"
    kv_device: str = "cpu"
    threads: int = 1
    pinned: bool = False
    numa: str = ""
    isa: str = ""
    kv_tokens: int = 0
    kv_windowed: bool = False
    kv_resident: int = 0
    kv_resident_tokens: int = 0
    swap_chunks: int = 0
    swap_chunk_tokens: int = 0
    swap_rate: float = 0.0
    gpu_mpi: bool = False
    speed: float = 1.0

    @property
    def place(self) -> str:
        """Name of its machine, or of its host if the machine has none."""
        return self.machine or self.host

    @property
    def tp_rank(self) -> int:
        """Number of its part of a stage's weights and attention heads."""
        return self.member % self.tp

    @property
    def pp_rank(self) -> int:
        """Number of its stage. The group's first members have the last one, which ends with the logits."""
        return (self.pp - 1 - self.member // self.tp) % self.pp

    @property
    def parts(self) -> int:
        """Members that have a copy of the model between them."""
        return self.tp * self.pp

    @property
    def turns(self) -> int:
        """Copies of the model that run the slices of a lane in turn."""
        return 1 if self.prefill else self.copies

    @property
    def only_prefills(self) -> bool:
        """Whether it has the weights for prompts alone."""
        return self.prefill and self.has_s and self.member > 0

    @property
    def has_s(self) -> bool:
        """Whether it plays the role S."""
        return "S" in self.role

    @property
    def has_r(self) -> bool:
        """Whether it plays the role R."""
        return "R" in self.role

    @property
    def uses_cores(self) -> bool:
        """Whether it computes on cores, not on GPUs alone."""
        return (self.has_s and self.device == "cpu") or (self.has_r and self.kv_device == "cpu")

    @property
    def gpu(self) -> str:
        """Device of the GPU that it computes on, `cpu` if it has none; a rank of both roles has one at most."""
        own = [self.device] * self.has_s + [self.kv_device] * self.has_r
        return next((device for device in own if device.startswith("cuda")), "cpu")

    @property
    def gpu_name(self) -> tuple[str, str] | None:
        """Host and name of this GPU, which ranks that share it have in common; None if it computes on none."""
        return (self.host, self.gpus[_number(self.gpu)]) if self.gpu != "cpu" else None

    @property
    def gpu_node(self) -> int | None:
        """NUMA node of this GPU; None if it computes on none, or if the system does not tell."""
        node = self.gpu_nodes[_number(self.gpu)] if self.gpu != "cpu" and self.gpu_nodes else _NOWHERE
        return None if node == _NOWHERE else node


def _number(device: str) -> int:
    """Return the number of a GPU among those that a rank sees: that of `cuda:1` is 1."""
    return int(device.partition(":")[2] or 0)


def assign_devices(ranks: Sequence[Rank], device: str | None, r_device: str) -> None:
    """Set the devices of every rank's slices and KV cache.

    S-ranks choose first. A rank takes the GPU that the fewest ranks have taken so far. With r_device `auto` an R-rank
    only takes a GPU that is free. A rank of both roles uses one GPU for both.
    """
    _require_gpus("--device", device, [r for r in ranks if r.has_s])
    _require_gpus("--r-device", r_device, [r for r in ranks if r.has_r])
    taken: Counter[tuple[str, str]] = Counter()
    by_choice = sorted(ranks, key=lambda rank: len(rank.gpus))  # those that see one GPU have no other
    for rank in (r for r in by_choice if r.has_s and device != "cpu"):
        rank.device = _take(rank, taken)
    for rank in (r for r in by_choice if r.has_r and r_device != "cpu"):
        own = rank.device != "cpu"
        rank.kv_device = rank.device if own else _take(rank, taken, free=r_device == "auto")


def _take(rank: Rank, taken: Counter[tuple[str, str]], free: bool = False) -> str:
    """Take a GPU for a rank and return its device, or `cpu` if the rank sees none, or none that is free."""
    users = [taken[rank.host, gpu] for gpu in rank.gpus]
    if not users or (free and min(users)):
        return "cpu"
    place = users.index(min(users))
    taken[rank.host, rank.gpus[place]] += 1
    return f"cuda:{place}"


def _require_gpus(flag: str, device: str | None, ranks: Iterable[Rank]) -> None:
    blind = [r for r in ranks if not r.gpus] if device == "cuda" else []
    if not blind:
        return
    where, trouble = f"rank {blind[0].rank} on {blind[0].host}", blind[0].gpu_trouble
    raise UserError(
        f"{flag} cuda: {where} cannot use its GPUs: {trouble}; mend the driver, or leave {flag} out"
        if trouble
        else f"{flag} cuda: {where} sees no GPU; give its host GPUs (such as srun --gpus-per-node=1) and a CUDA build "
        f"of torch, or leave {flag} out",
        everywhere=True,
    )


def assign_cores(ranks: Sequence[Rank]) -> None:
    """Divide cores among the ranks of a host that were given the same ones, if there are enough for all.

    A rank that computes on a GPU gets cores of the NUMA node that the GPU is attached to, as far as there are some.
    """
    given: dict[tuple[str, tuple[int, ...]], list[Rank]] = {}
    for rank in ranks:
        given.setdefault((rank.host, tuple(rank.cpus)), []).append(rank)
    for (_, cpus), sharing in given.items():
        pinned = len(sharing) <= len(cpus)
        if pinned:
            _deal_cores(sharing)
        for rank in sharing:
            rank.pinned, rank.threads = pinned, len(rank.cpus) if pinned else 1


def sharing_cores(ranks: Iterable[Rank]) -> set[int]:
    """Return the ranks whose cores others of their machine have, too, by their ranks at the start."""
    users: dict[tuple[str, int], set[int]] = {}
    for rank in ranks:
        for cpu in rank.cpus:
            users.setdefault((rank.place, cpu), set()).add(rank.rank)
    return set().union(*(sharing for sharing in users.values() if len(sharing) > 1))


def _deal_cores(ranks: Sequence[Rank]) -> None:
    """Deal out the cores that ranks were given: a few to those that compute on GPUs alone, the rest evenly."""
    left, node_of = ranks[0].cpus, dict(zip(ranks[0].cpus, ranks[0].nodes, strict=False))
    computing = [rank for rank in ranks if rank.uses_cores]
    beside = [rank for rank in ranks if not rank.uses_cores]
    few = [min(_BESIDE_GPU, len(left) // len(ranks))] * len(beside)
    for rank, count in zip(beside, few if computing else map(len, _evenly(left, len(beside))), strict=True):
        near = [cpu for cpu in left if node_of.get(cpu, _NOWHERE) == rank.gpu_node]
        rank.cpus = (near + [cpu for cpu in left if cpu not in near])[:count]
        left = [cpu for cpu in left if cpu not in rank.cpus]
    for rank, own in zip(computing, _by_node(left, node_of, len(computing)), strict=True):
        rank.cpus = own
    for rank in ranks:
        rank.nodes = [node_of[cpu] for cpu in rank.cpus if cpu in node_of]


def _by_node(cpus: Sequence[int], node_of: Mapping[int, int], count: int) -> list[list[int]]:
    """Return `cpus` in `count` shares: as many of every NUMA node if they divide, else even ones."""
    nodes = [list(own) for _, own in groupby(cpus, key=lambda cpu: node_of.get(cpu, _NOWHERE))]
    each, over = divmod(count, max(len(nodes), 1))
    if over or any(len(own) < each for own in nodes):
        return _evenly(cpus, count)
    return [share for own in nodes for share in _evenly(own, each)]


def _evenly(cpus: Sequence[int], count: int) -> list[list[int]]:
    """Return `cpus` in `count` shares."""
    return [list(cpus[len(cpus) * i // count : len(cpus) * (i + 1) // count]) for i in range(count)]
