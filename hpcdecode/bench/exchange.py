"""`mpiexec -n N hpcdecode bench exchange`: a lane's links against plain MPI loops of the same bytes.

One S-rank, N - 1 R-ranks. Per layer the S-rank sends q, k, v and gets o; an R-rank copies its part of q into o in place
of attending. Every case is verified first; passes of all ways alternate. A ratio is the links' bandwidth over that of
the way, the median of the pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import perf_counter

import numpy as np
import torch

from hpcdecode.attention.base import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.ranks import launch
from hpcdecode.report.benchmark import case, machine

LAYERS = 16  # exchanges a pass
SHAPES = {  # hidden: query heads, KV heads, head_dim
    1024: (16, 4, 64),
    4096: (32, 8, 128),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="sequences of the lane")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096], choices=tuple(SHAPES))
    parser.add_argument("--passes", type=int, default=15)


def run(args: argparse.Namespace) -> dict | None:
    """Verify, then measure; the S-rank returns what `bench --json` prints. UserError in a world of 1."""
    if args.comm is None:
        raise UserError("bench exchange: expected several ranks; start it with mpiexec -n 3 hpcdecode bench exchange")
    team = launch.assemble(args.comm, 1)
    team.pin()
    torch.set_num_threads(team.me.threads)
    cases = [c for hidden in args.hidden for rows in args.rows for c in _measured(args, hidden, rows)]
    return {"bench": "exchange", "machine": machine(), "cases": cases} if args.comm.rank == 0 else None


def _measured(args: argparse.Namespace, hidden: int, rows: int) -> Iterator[dict]:
    from hpcdecode.bench.raw_exchange import WAYS, Ends

    comm = args.comm
    parts = comm.size - 1
    heads, kv_heads, dim = SHAPES[hidden]
    shape = LayerShape(kv_heads, dim, dim, heads, dim**-0.5)
    rows = -(-rows // parts) * parts  # the same number on every R-rank
    there, back = (rows // parts * columns * 2 for columns in (shape.row_columns, shape.out_columns))
    seconds: dict[str, list[float]] = {}
    with _Links(comm, shape, rows) as links, ExitStack() as stack:
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


def _pass(comm, one_round: Callable[[], None]) -> float:
    """Seconds of an exchange, the mean of a pass."""
    launch.gather_all(comm, 0, int)
    one_round()
    start = perf_counter()
    for _ in range(LAYERS):
        one_round()
    return (perf_counter() - start) / LAYERS


def _echo(there: np.ndarray, back: np.ndarray) -> None:
    back[:] = there[: len(back)]


class _Links:
    """One lane whose R-ranks answer every layer with the first columns of q. As a context; every rank makes one."""

    def __init__(self, comm, shape: LayerShape, rows: int):
        from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
        from hpcdecode.exchange.partition import Partition
        from hpcdecode.exchange.wire import shared_sizes
        from hpcdecode.mpi.wait import wait
        from hpcdecode.schedule.plan import Plan

        parts, shapes, dtype = comm.size - 1, [shape], torch.bfloat16
        wire = (shapes, rows, dtype, shared_sizes(shapes, rows, 0, dtype), Partition("request", parts))
        self._wait, self._shape, self.is_s = wait, shape, comm.rank == 0
        if self.is_s:
            self.link = MpiSLink(comm.Dup(), *wire)
            decode = np.stack([np.arange(rows) % parts, np.arange(rows) // parts], axis=1).astype(np.int32)
            self.link.begin(Plan(decode=decode))
            qkv = torch.randn(rows, shape.row_columns).to(dtype)
            kv = shape.kv_heads * shape.k_dim
            self.q, self.k, self.v = qkv.split([shape.q_columns, kv, kv], dim=1)
            self.o = torch.zeros(rows, shape.out_columns, dtype=dtype)
        else:
            self.link = MpiRLink(comm.Dup(), *wire)
            wait(self.link.receive_plan())
            self.link.plan()

    def __enter__(self) -> _Links:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def round(self) -> None:
        if self.is_s:
            self.link.post(0, self.q, self.k, self.v, self.o)
            self.link.wait()
            self.link.take()
            return
        for request, parcel in self.link.receive(0):
            self._wait(request)
            self.link.opened()
            parcel.out.copy_(parcel.rows[:, : self._shape.out_columns])
            self.link.send(parcel)

    def verify(self) -> None:
        """Raises RuntimeError where what comes back is not what was sent."""
        self.round()
        if self.is_s and not torch.equal(self.o, self.q[:, : self._shape.out_columns]):
            raise RuntimeError("bench exchange: what came back is not what was sent")
