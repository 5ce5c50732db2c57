"""What the members of a group add up, over torch's process groups: NCCL between GPUs, gloo in tests on CPUs.

As with MPI the library moves, and the additions are ours, in the order of the members. So the bits of a sum depend on
the number of members alone, which an all-reduce of NCCL does not promise.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from hpcdecode.exchange.own_rows import OwnRows
from hpcdecode.exchange.sums import Ints, MpiSums, Sums, at_once, dealt, in_order, sent_by_all
from hpcdecode.mpi.collectives import broadcast, gather_all
from hpcdecode.mpi.wait import Waitable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WAIT = timedelta(days=365)  # a group may idle; the watchdog names members that hang


class TorchWork:
    """A collective of a process group as something that can be waited for.

    Args:
        work: What torch returns for it.
    """

    def __init__(self, work: dist.Work):
        self._work = work

    def Test(self) -> bool:
        """Return whether it is complete; raise what it failed with."""
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


class ProcessGroup(Protocol):
    """What is used of a process group of torch, of any backend."""

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> Any:
        """Send elements to every member, and receive some of each."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Any:
        """Send all of a tensor to every member; all have equally many elements."""


class TorchSums:
    """Sums by collectives of a process group, in the memory of a device (see `Sums`).

    Args:
        comm: Of the members, in their order.
        group: Process group of the same members.
    """

    def __init__(self, comm: MPI.Intracomm, group: ProcessGroup):
        self.comm, self.member = comm, comm.rank
        self.sent_bytes = self.whole_bytes = 0
        self._group = group

    def add(self, share: Tensor, rows: OwnRows | None = None) -> Generator[Waitable, None, Tensor]:
        """Yield what to wait for; return the sum of all members' shares. All rows are sent, whatever `rows` says."""
        flat, members = share.detach().contiguous().flatten(), self.comm.size
        self.whole_bytes += sent_by_all(flat, members)
        if at_once(flat, members):
            every = flat.new_empty(members * len(flat))
            yield TorchWork(self._group._allgather_base(every, flat))
            self.sent_bytes += (members - 1) * flat.nbytes
            return in_order(every.view(members, -1)).to(flat.dtype).view(share.shape)
        counts = dealt(len(flat), members)
        own, most = int(counts[self.member]), int(counts.max())
        came = flat.new_empty(members * own)
        yield TorchWork(self._group.alltoall_base(came, flat, [own] * members, counts.tolist()))
        mine, sums = flat.new_zeros(most), flat.new_empty(members * most)
        mine[:own] = in_order(came.view(members, own))
        yield TorchWork(self._group._allgather_base(sums, mine))
        parts = zip(sums.split(most), counts.tolist(), strict=True)
        self.sent_bytes += (len(flat) - own + (members - 1) * most) * flat.element_size()
        return torch.cat([part[:count] for part, count in parts]).view(share.shape)

    def gather(self, part: Tensor, columns: Ints) -> Generator[Waitable, None, list[Tensor]]:
        """Yield what to wait for; return all members' parts [rows, columns] on the first, nothing on the others."""
        flat, sizes = part.detach().contiguous().flatten(), (columns * len(part)).tolist()
        home, nothing = self.member == 0, [0] * (self.comm.size - 1)
        came = flat.new_empty(sum(sizes) if home else 0)
        to = sizes if home else [0, *nothing]
        yield TorchWork(self._group.alltoall_base(came, flat, to, [len(flat), *nothing]))
        return [each.view(len(part), -1) for each in came.split(sizes)] if home else []


def open_sums(stages: Sequence[MPI.Intracomm | None], device: torch.device) -> list[Sums | None]:
    """Return the sums of the lanes of a stage's member, over MPI or between GPUs; all members call this.

    GPUs use NCCL if torch has it and no two members share one, else their sums go through memory of the host.

    Args:
        stages: Of the members, by lane; None if a stage has one.
        device: Of this member.
    """
    first = next((stage for stage in stages if stage is not None), None)
    if first is None or not _have_nccl(first, device):
        return [None if stage is None else MpiSums(stage) for stage in stages]
    comms = [stage for stage in stages if stage is not None]
    return [*torch_sums(comms, "nccl")]


def _have_nccl(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Return whether all members have a GPU of their own that NCCL reaches."""
    able = device.type == "cuda" and dist.is_available() and dist.is_nccl_available()
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}" if able else ""
    names = gather_all(comm, name, str)
    return all(names) and len(set(names)) == len(names)


def torch_sums(comms: Sequence[MPI.Intracomm], backend: str) -> list[TorchSums]:
    """Return sums over process groups of a backend, one for each communicator of the same members in the same order.

    Args:
        comms: Communicators, at least one.
        backend: `nccl` or `gloo`.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    comm = comms[0]
    hosts = gather_all(comm, socket.gethostname(), str)
    host = "localhost" if len(set(hosts)) == 1 else hosts[0]
    store = TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = broadcast(comm, store.port if store else 0, int)
    if store is None:
        store = TCPStore(host, port, comm.size, is_master=False, wait_for_workers=False)
    lanes = [PrefixStore(f"lane{i}", store) for i in range(len(comms))]
    return [TorchSums(own, _process_group(lane, own, backend)) for lane, own in zip(lanes, comms, strict=True)]


def _process_group(store: Store, comm: MPI.Intracomm, backend: str) -> ProcessGroup:
    """Return a process group of its own, which is not known to `torch.distributed` as a default."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _WAIT
        return cast(ProcessGroup, dist.ProcessGroupNCCL(store, comm.rank, comm.size, options))
    return cast(ProcessGroup, dist.ProcessGroupGloo(store, comm.rank, comm.size, _WAIT))
