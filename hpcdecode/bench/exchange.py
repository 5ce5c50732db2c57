"""`mpiexec -n N hpcdecode bench exchange`: a lane's links against plain MPI loops of the same bytes.

One S-rank, N - 1 R-ranks. Per layer the S-rank sends q, k, v and gets o. An R-rank copies its part of q into o in place
of attending. Every case is verified first; passes of all ways alternate. A ratio is the links' bandwidth over that of
the way, the median of the pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpcdecode.attention.base import LayerShape
from hpcdecode.bench.output import Case, Report
from hpcdecode.errors import UserError
from hpcdecode.mpi.collectives import gather_all
from hpcdecode.ranks.team import assemble
from hpcdecode.report.benchmark import case, machine

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.memory import LaneSpec

LAYERS = 16  # exchanges a pass
SHAPES = {  # hidden: query heads, KV heads, head_dim
    1024: (16, 4, 64),
    4096: (32, 8, 128),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="sequences of the lane")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096], choices=tuple(SHAPES))
    parser.add_argument("--passes", type=int, default=15)
    help = "how the links go: messages share memory within a host; collectives never do"
    parser.add_argument("--exchange", choices=("messages", "collective"), default="messages", help=help)


def run(args: argparse.Namespace) -> Report | None:
    """Verify, then measure; return the report on the S-rank, None on R-ranks.

    Raises:
        UserError: In a world of 1.
    """
    if args.comm is None:
        raise UserError("bench exchange: expected several ranks; start it with mpiexec -n 3 hpcdecode bench exchange")
    team = assemble(args.comm)
    team.pin()
    torch.set_num_threads(team.me.threads)
    cases = [c for hidden in args.hidden for rows in args.rows for c in _measured(args, hidden, rows)]
    return {"bench": "exchange", "machine": machine(), "cases": cases} if args.comm.rank == 0 else None


def _measured(args: argparse.Namespace, hidden: int, rows: int) -> Iterator[Case]:
    """Yield the cases of one size on the S-rank, and none on R-ranks."""
    from hpcdecode.bench.raw_exchange import WAYS, Ends

    comm: MPI.Intracomm = args.comm
    parts = comm.size - 1
    heads, kv_heads, dim = SHAPES[hidden]
    shape = LayerShape(kv_heads, dim, dim, heads, dim**-0.5)
    rows = -(-rows // parts) * parts  # the same number on every R-rank
    there, back = (rows // parts * columns * 2 for columns in (shape.row_columns, shape.out_columns))
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        links: _Links = (_RLinks if comm.rank else _SLinks)(comm, shape, rows, args.exchange)
        stack.callback(links.close)
        ways: dict[str, Callable[[], None]] = {"links": links.round}
        for way in WAYS:
            ways[way.__name__] = way(stack.enter_context(Ends(comm, there, back, _echo)))
        links.verify()
        for _ in range(args.passes + 1):
            for name, one_round in ways.items():
                seconds.setdefault(name, []).append(_pass(comm, one_round))
    if comm.rank:
        return
    ours, label = seconds.pop("links")[1:], f"{rows} rows of {hidden}, {parts} R-ranks"
    for name, (_, *theirs) in seconds.items():
        speed = [(there + back) * parts / s / 1e9 for s in theirs]
        yield case(f"{label}: {name}", speed, "GB/s", "links", [b / a for a, b in zip(ours, theirs, strict=True)])
    plain = seconds["messages"][1:]
    extra = [(a - b) * 1e6 / (2 * parts) for a, b in zip(ours, plain, strict=True)]
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    yield case(f"{label}: the links' software", extra, "us a message", "time of messages", ratios)


def _pass(comm: MPI.Intracomm, one_round: Callable[[], None]) -> float:
    """Return the seconds of an exchange, the mean of a pass."""
    gather_all(comm, 0, int)
    one_round()
    start = perf_counter()
    for _ in range(LAYERS):
        one_round()
    return (perf_counter() - start) / LAYERS


def _echo(there: NDArray[np.uint8], back: NDArray[np.uint8]) -> None:
    back[:] = there[: len(back)]


class _Links(Protocol):
    """One rank's end of a lane whose R-ranks answer every layer with the first columns of q."""

    def round(self) -> None:
        """Exchange one layer."""

    def verify(self) -> None:
        """Exchange one layer; raise RuntimeError on the S-rank if what comes back is not what was sent."""

    def close(self) -> None:
        """Close the link."""


def _lane_spec(comm: MPI.Intracomm, shape: LayerShape, rows: int) -> LaneSpec:
    from hpcdecode.exchange.memory import LaneSpec, shared_bytes
    from hpcdecode.exchange.partition import Partition

    dtype = torch.bfloat16
    shared = shared_bytes([shape], rows, 0, dtype)
    return LaneSpec([shape], rows, dtype, Partition("request", comm.size - 1), shared)


class _SLinks:
    """The S-rank's end, and what it sends."""

    def __init__(self, comm: MPI.Intracomm, shape: LayerShape, rows: int, way: str):
        from hpcdecode.exchange.collective import CollectiveSLink
        from hpcdecode.exchange.mpi import MpiSLink
        from hpcdecode.schedule.plan import Plan

        spec, parts = _lane_spec(comm, shape, rows), comm.size - 1
        self.link = (CollectiveSLink if way == "collective" else MpiSLink)(comm.Dup(), spec)
        decode = np.stack([np.arange(rows) % parts, np.arange(rows) // parts], axis=1).astype(np.int32)
        self.link.send_plan(Plan(decode=decode))
        qkv = torch.randn(rows, shape.row_columns).to(spec.dtype)
        kv = shape.kv_heads * shape.k_dim
        self.q, self.k, self.v = qkv.split([shape.q_columns, kv, kv], dim=1)
        self.o = torch.zeros(rows, shape.out_columns, dtype=spec.dtype)

    def round(self) -> None:
        self.link.send_qkv(0, self.q, self.k, self.v, self.o)
        self.link.wait()
        self.link.recv_output()

    def verify(self) -> None:
        self.round()
        if not torch.equal(self.o, self.q[:, : self.o.shape[1]]):
            raise RuntimeError("bench exchange: what came back is not what was sent")

    def close(self) -> None:
        self.link.close()


class _RLinks:
    """An R-rank's end."""

    def __init__(self, comm: MPI.Intracomm, shape: LayerShape, rows: int, way: str):
        from hpcdecode.exchange.collective import CollectiveRLink
        from hpcdecode.exchange.mpi import MpiRLink
        from hpcdecode.mpi.wait import wait

        self._out_columns, self._wait = shape.out_columns, wait
        self.link = (CollectiveRLink if way == "collective" else MpiRLink)(comm.Dup(), _lane_spec(comm, shape, rows))
        wait(self.link.recv_plan())
        self.link.take_plan()

    def round(self) -> None:
        for request, message in self.link.recv_qkv(0):
            self._wait(request)
            self.link.take_qkv()
            message.out.copy_(message.rows[:, : self._out_columns])
            self.link.send_output(message)

    def verify(self) -> None:
        self.round()

    def close(self) -> None:
        self.link.close()
