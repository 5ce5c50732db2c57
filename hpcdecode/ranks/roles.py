"""Who does what in a world, on which cores and GPUs: every rank decides it alike, from what all of them see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from hpcdecode.errors import UserError

_BESIDE_GPU = 2  # cores at most of a rank that computes on a GPU, where others of its host compute on cores


class Rank(msgspec.Struct, kw_only=True):
    """One rank, as printed in the topology."""

    rank: int  # in the world as it began
    host: str
    cpus: list[int]
    gpus: list[str] = []  # that it sees, by names that are the same on all ranks of a host
    role: str = ""
    device: str = "cpu"  # of the slices
    kv_device: str = "cpu"  # of the KV cache and its attention
    threads: int = 1
    pinned: bool = False
    numa: str = ""
    isa: str = ""
    kv_tokens: int = 0
    gpu_mpi: bool = False  # whether its MPI takes the memory of GPUs
    speed: float = 1.0  # of attention, where R-ranks differ: the slowest has 1

    @property
    def has_s(self) -> bool:
        return "S" in self.role

    @property
    def has_r(self) -> bool:
        return "R" in self.role

    @property
    def uses_cores(self) -> bool:
        """Whether it computes on them, rather than on GPUs alone."""
        return (self.has_s and self.device == "cpu") or (self.has_r and self.kv_device == "cpu")


def assign(ranks: Sequence[Rank], s_ranks: int | None, device: str | None, r_device: str) -> None:
    """Give every rank its role, devices and cores. The rest is as in `EngineOptions`; UserError where the world cannot
    have it."""
    assign_roles(ranks, s_ranks)
    assign_devices(ranks, device, r_device)
    assign_cores(ranks)


def assign_roles(ranks: Sequence[Rank], s_ranks: int | None) -> None:
    """S-ranks are `s_ranks` ranks, those that see a GPU first; if not given, those that see one, or else rank 0."""
    size = len(ranks)
    if size == 1:
        if s_ranks not in (None, 1):
            raise UserError(
                f"--s-ranks {s_ranks}: the world has 1 rank, which plays both roles; start more ranks", everywhere=True
            )
        ranks[0].role = "SR"
        return
    seeing = sum(bool(r.gpus) for r in ranks)
    count = s_ranks or (seeing if 0 < seeing < size else 1)
    if count >= size:
        raise UserError(
            f"--s-ranks {count}: the world has {size} ranks, which leaves no R-rank to hold the KV cache; "
            f"expected 1 to {size - 1}, or start more ranks",
            everywhere=True,
        )
    chosen = sorted(ranks, key=lambda r: (not r.gpus, r.rank))[:count]
    for rank in ranks:
        rank.role = "S" if rank in chosen else "R"


def assign_devices(ranks: Sequence[Rank], device: str | None, r_device: str) -> None:
    """Where every rank computes slices, and where it keeps the KV cache and attends.

    A rank takes the GPU that, of those that it sees, fewest have taken; S-ranks choose first. r_device `auto`: R-ranks
    take a GPU that no other has. A rank of both roles has both on one.
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
    """The device; the CPU where the rank sees no GPU, or none that is free."""
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
    """Ranks of a host that were given the same cores share them out, if there are enough for all."""
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
    """Even ones, but for ranks that have few because they do not compute on cores while others do."""
    few = min(_BESIDE_GPU, cores // len(computes))
    if any(computes):
        cores -= few * (len(computes) - sum(computes))
    else:
        computes = [True] * len(computes)
    even = iter([cores * (i + 1) // sum(computes) - cores * i // sum(computes) for i in range(sum(computes))])
    return [next(even) if one else few for one in computes]
