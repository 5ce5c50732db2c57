"""Run by mpiexec: sums of members against additions in their order, and parts that home gathers."""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

from hpcdecode.exchange import sums as module
from hpcdecode.exchange.own_rows import OwnRows
from hpcdecode.exchange.sums import MpiSums, Sums
from hpcdecode.exchange.tensors import receive_tensors, send_tensors
from hpcdecode.exchange.torch_sums import torch_sums
from hpcdecode.mpi.collectives import gather_all
from hpcdecode.mpi.wait import wait, waited

WORLD = MPI.COMM_WORLD
FEW_BYTES = module._AT_ONCE_BYTES
SHAPES = ((1, 1), (1, 64), (3, 200), (1, 5, 96), (129, 1000), (301, 1000))


def shares(members: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(members)
    return [(torch.randn(shape, generator=generator) * 10**i).to(dtype) for i in range(members)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check(comm: MPI.Intracomm, sums: Sums) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            all_shares = shares(comm.size, shape, dtype)
            own = all_shares[comm.rank]
            found = waited(sums.add(own))
            assert torch.equal(found, in_order(all_shares)), (comm.size, shape)
            row = waited(sums.add(own[..., -1:, :]))  # a row alone
            assert torch.equal(row, found[..., -1:, :])
            strided = torch.cat([own, own], -1)[..., : shape[-1]]
            assert torch.equal(waited(sums.add(strided)), found)
    columns = np.arange(2, 2 + comm.size)
    part = torch.full((3, int(columns[comm.rank])), float(comm.rank))
    parts = waited(sums.gather(part, columns))
    if comm.rank == 0:
        assert [p.shape[1] for p in parts] == columns.tolist() and [float(p.max()) for p in parts] == list(
            range(comm.size)
        )


def check_both_under_way(a: Sums, b: Sums) -> None:
    """Lanes go on in any order: one member starts that of `b` first."""
    own = shares(a.comm.size, (5, 300), torch.bfloat16)
    works = [sums.add(own[a.comm.rank] * factor) for sums, factor in ((a, 1), (b, 2))]
    begun = {lane: next(works[lane]) for lane in ((1, 0) if a.comm.rank == 1 else (0, 1))}
    for lane, (work, factor) in enumerate(zip(works, (1, 2), strict=True)):
        wait(begun[lane])
        assert torch.equal(waited(work), in_order([part * factor for part in own]))


def routed(members: int, chosen: int, dtype: torch.dtype, tokens: int) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Members of `chosen` experts for each token, and shares that are zeros elsewhere, with some zeros below 0."""
    generator = torch.Generator().manual_seed(tokens)
    expert = torch.stack([torch.randperm(2 * members, generator=generator)[:chosen] for _ in range(tokens)])
    owners, parts = (expert * members // (2 * members)).numpy(), shares(members, (tokens, 768), dtype)
    for member, part in enumerate(parts):
        part[:, :5] = -0.0
        part[torch.from_numpy(~(owners == member).any(1))] = 0.0
    return owners, parts


def check_own_rows(comm: MPI.Intracomm, at_once: bool) -> None:
    """Sums of rows that some members have: the bits of all rows', and the bytes that `OwnRows.way` counts.

    Args:
        comm: of the members.
        at_once: whether shares are as small as those that go by one collective.
    """
    seen = set()
    module._AT_ONCE_BYTES = FEW_BYTES if at_once else 0
    for dtype in (torch.float32, torch.bfloat16):
        for chosen, tokens in ((1, 1), (1, 40), (2, 1), (2, 40), (comm.size, 40), (2 * comm.size, 3)):
            owners, parts = routed(comm.size, chosen, dtype, tokens)
            rows, sums, whole = OwnRows(owners, comm.size), MpiSums(comm), MpiSums(comm)
            found, expected = (
                waited(sums.add(parts[comm.rank][None], rows)),
                waited(whole.add(parts[comm.rank][None])),
            )
            assert found.shape == expected.shape == (1, tokens, 768)
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (comm.size, chosen, tokens)
            sent, sent_whole = (sum(gather_all(comm, each.sent_bytes, int)) for each in (sums, whole))
            n, k, row = int(rows.counts.sum()), comm.size, 768 * dtype.itemsize
            of_way = {"rows": (k - 1) * n, "columns": (k - 1) * (n / k + tokens), "all": 2 * (k - 1) * tokens}
            assert of_way[rows.way] == min(of_way.values())
            if at_once:
                of_way = dict.fromkeys(("rows", "columns"), (k - 1) * n) | {"all": (k - 1) * k * tokens}
            assert sent_whole == of_way["all"] * row, (sent_whole, of_way, row)
            assert abs(sent - of_way[rows.way] * row) < 1, (sent, of_way)
            assert sums.whole_bytes == whole.whole_bytes and abs(sent_whole - k * whole.whole_bytes) < k
            few = parts[comm.rank][:, :70].contiguous()  # some members add nothing up
            assert torch.equal(waited(sums.add(few, rows)), found[0, :, :70])
            seen.add(rows.way)
    assert seen >= ({"rows"} if comm.size == 2 else {"rows", "columns", "all"}), seen


def check_tensors() -> None:
    sent = [torch.arange(6.0).view(2, 3), torch.empty(0, 4), torch.arange(4).bfloat16()]
    if WORLD.rank == 1:
        for request in send_tensors(WORLD, 0, 5, sent):
            wait(request)
    if WORLD.rank == 0:
        found = waited(receive_tensors(WORLD, 1, 5, torch.device("cpu")))
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, sent, strict=True))


for size in (2, 3, 4):
    comm = WORLD.Split(0 if WORLD.rank < size else MPI.UNDEFINED)
    if comm != MPI.COMM_NULL:
        check(comm, MpiSums(comm))
        check_own_rows(comm, True)
        check_own_rows(comm, False)
        module._AT_ONCE_BYTES = FEW_BYTES
        for sums in torch_sums([comm, comm], "gloo"):  # of two lanes
            check(comm, sums)
        check_both_under_way(*torch_sums([comm, comm], "gloo"))
check_tensors()
WORLD.Barrier()
if WORLD.rank == 0:
    print("SUMS ok")
