"""A rank, its cores and its GPUs. Every rank of a world computes the same assignment from the same facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from hpcdecode.errors import UserError

_BESIDE_GPU = 2  # most cores of a rank that computes on a GPU, if other ranks of its host compute on cores


class Rank(msgspec.Struct, kw_only=True):
    """One rank, as printed in the topology.

    Attributes:
        rank: Rank in the world at its start.
        host: Host name.
        cpus: CPUs that it may use.
        gpus: GPUs that it sees, by names that are the same on all ranks of a host.
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
        kv_resident: Bytes of memory for its KV cache, the rest of which lies in tiers; 0 if all lies in memory.
        kv_resident_tokens: Tokens that this memory has room for.
        swap_chunks: Of its tiers for sequences that leave the KV cache; 0 without tiers.
        swap_chunk_tokens: Tokens of such a chunk.
        swap_rate: Tokens that it writes to its tiers, or reads, in a second; with `kv_resident`, that it reads.
        gpu_mpi: Whether its MPI takes the memory of GPUs.
        speed: Speed of attention relative to the slowest R-rank; 1 if R-ranks are alike.
    """

    rank: int
    host: str
    cpus: list[int]
    gpus: list[str] = []
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
    kv_resident: int = 0
    kv_resident_tokens: int = 0
    swap_chunks: int = 0
    swap_chunk_tokens: int = 0
    swap_rate: float = 0.0
    gpu_mpi: bool = False
    speed: float = 1.0

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


def assign_devices(ranks: Sequence[Rank], device: str | None, r_device: str) -> None:
    """Set the devices of every rank's slices and KV cache.

    S-ranks choose first. A rank takes the GPU that the fewest ranks have taken so far. With r_device `auto` an R-rank
    only takes a GPU that is free. A rank of both roles uses one GPU for both.
    """
    _require_gpus("--device", device, [r for r in ranks if r.has_s])
    _require_gpus("--r-device", r_device, [r for r in ranks if r.has_r])
    taken: Counter[tuple[str, str]] = Counter()
    for rank in (r for r in ranks if r.has_s and device != "cpu"):
        rank.device = _take(rank, taken)
    for rank in (r for r in ranks if r.has_r and r_device != "cpu"):
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
    if blind:
        raise UserError(
            f"{flag} cuda: rank {blind[0].rank} on {blind[0].host} sees no GPU; give its host GPUs (such as srun "
            f"--gpus-per-node=1) and a CUDA build of torch, or leave {flag} out",
            everywhere=True,
        )


def assign_cores(ranks: Sequence[Rank]) -> None:
    """Divide cores among the ranks of a host that were given the same ones, if there are enough for all."""
    given = {rank.rank: rank.cpus for rank in ranks}
    for rank in ranks:
        cpus = given[rank.rank]
        sharing = [r for r in ranks if r.host == rank.host and given[r.rank] == cpus]
        rank.pinned = len(sharing) <= len(cpus)
        if rank.pinned:
            counts = _shares(len(cpus), [r.uses_cores for r in sharing])
            place = sharing.index(rank)
            begin = sum(counts[:place])
            rank.cpus = cpus[begin : begin + counts[place]]
        rank.threads = len(rank.cpus) if rank.pinned else 1


def _shares(cores: int, computes: Sequence[bool]) -> list[int]:
    """Return the cores of every rank: few for those that do not compute on cores, the rest in even shares."""
    few = min(_BESIDE_GPU, cores // len(computes))
    if any(computes):
        cores -= few * (len(computes) - sum(computes))
    else:
        computes = [True] * len(computes)
    even = iter([cores * (i + 1) // sum(computes) - cores * i // sum(computes) for i in range(sum(computes))])
    return [next(even) if one else few for one in computes]
