"""`mpiexec -n N hpcdecode bench exchange`: a lane's links against plain MPI loops of the same calls and bytes.

One S-rank, N - 1 R-ranks. Per layer the S-rank sends q, k, v and gets o. An R-rank copies its part of q into o in place
of attending. Every case is verified first; passes of all ways alternate. A ratio is the bandwidth over that of the way
it is held against, the median of the pairs. With --nodes the command starts itself on emulated nodes. With --progress
it shows what is left to wait for after a slice, in which the S-rank computes for twice the time of an exchange.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench.nodes import Nodes
from hpcdecode.bench.output import Case, Report
from hpcdecode.errors import UserError
from hpcdecode.mpi.collectives import gather_all
from hpcdecode.ranks.team import assemble
from hpcdecode.report.benchmark import case, machine, seconds_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.probe import LinkEnd

LAYERS = 16  # exchanges a pass
SHAPES = {  # hidden: query heads, KV heads, head_dim
    1024: (16, 4, 64),
    4096: (32, 8, 128),
}
LINKS = {"messages": "raw messages", "collective": "raw neighbours"}  # each with the plain loop of the same calls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="sequences of the lane")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096], choices=tuple(SHAPES))
    help = "use so many of the R-ranks, one number after the other (all)"
    parser.add_argument("--r-ranks", type=int, nargs="+", metavar="P", help=help)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--all", action="store_true", help="also other plain loops: persistent calls and Ialltoallv")
    help = "also measure how much of an exchange is left to wait for after the S-rank has computed meanwhile"
    parser.add_argument("--progress", action="store_true", help=help)
    help = "start a rank on each of so many emulated nodes, which needs root; a node has a core, if there are enough"
    parser.add_argument("--nodes", type=int, metavar="N", help=help)


def run(args: argparse.Namespace) -> Report | None:
    """Verify, then measure; return the report on the S-rank, None on R-ranks and on what started them.

    Raises:
        UserError: In a world of 1 without --nodes, or if there are fewer ranks or nodes than asked for.
    """
    if args.comm is None:
        _start_on_nodes(args)
        return None
    team = assemble(args.comm)
    hosts, ranks = len({rank.host for rank in team.ranks}), args.comm.size
    r_ranks = args.r_ranks or [ranks - 1]
    if args.nodes not in (None, hosts):
        raise UserError(f"--nodes: expected {args.nodes} hosts, got ranks on {hosts}; start it without mpiexec")
    if not 1 <= min(r_ranks) <= max(r_ranks) < ranks:
        raise UserError(f"--r-ranks: expected 1 to {ranks - 1} in a world of {ranks}, got {max(r_ranks)}")
    team.pin()
    torch.set_num_threads(team.me.threads)
    sizes = [(parts, hidden, rows) for parts in r_ranks for hidden in args.hidden for rows in args.rows]
    cases = [c for size in sizes for c in _measured(args, *size)]
    facts = {**machine(), "hosts": hosts}
    return {"bench": "exchange", "machine": facts, "cases": cases} if args.comm.rank == 0 else None


def _start_on_nodes(args: argparse.Namespace) -> None:
    """Run this command with a rank on each of emulated nodes, to its end."""
    if args.nodes is None:
        example = "mpiexec -n 3 hpcdecode bench exchange"
        raise UserError(f"bench exchange: expected several ranks; start it with {example}, or with --nodes 3")
    if args.nodes < 2:
        raise UserError(f"--nodes: expected 2 or more, an S-rank and its R-ranks, got {args.nodes}")
    with Nodes(args.nodes) as nodes:
        line = nodes.line(sys.executable, "-m", "hpcdecode", "bench", "exchange", *args.arguments)
        if code := subprocess.run(line, check=False).returncode:
            raise UserError(f"bench exchange: expected the ranks on the nodes to end well, got exit code {code}")


def _measured(args: argparse.Namespace, parts: int, hidden: int, rows: int) -> Iterator[Case]:
    """Yield the cases of one size on the S-rank, and none on R-ranks."""
    from hpcdecode.exchange.communicators import subset

    if args.comm.rank <= parts:
        comm = subset(args.comm, range(parts + 1))
        seconds = _seconds(args, comm, hidden, rows)
        comm.Free()
        if args.comm.rank == 0:
            yield from _cases(seconds, parts, hidden, rows)
    gather_all(args.comm, 0, int)  # whoever has no part in it waits here


def _seconds(args: argparse.Namespace, comm: MPI.Intracomm, hidden: int, rows: int) -> dict[str, list[float]]:
    """Return the seconds of an exchange in every pass, by way."""
    from hpcdecode.bench.raw_exchange import WAYS, Ends
    from hpcdecode.exchange.probe import lane_end

    shape, rows = _shape(hidden), _rounded(rows, comm.size - 1)
    there, back = (rows // (comm.size - 1) * columns * 2 for columns in (shape.row_columns, shape.out_columns))
    seconds: dict[str, list[float]] = {}
    ends: dict[str, LinkEnd] = {}
    with ExitStack() as stack:
        ways: dict[str, Callable[[], None]] = {}
        for name in LINKS:
            links = lane_end(comm, shape, rows, name)
            stack.callback(links.close)
            links.verify()
            ways[name], ends[name] = links.round, links
        for way in WAYS:
            name = f"raw {way.__name__.replace('_', ' ')}"
            if args.all or name in LINKS.values():
                ways[name] = way(stack.enter_context(Ends(comm, there, back, _echo(shape))))
        work = _Computing(2 * _pass(comm, ways["messages"]))
        for _ in range(args.passes + 1):
            for name, one_round in ways.items():
                seconds.setdefault(name, []).append(_pass(comm, one_round))
            for name, end in ends.items() if args.progress else ():
                gather_all(comm, 0, int)
                left = median(end.left_after(work) for _ in range(LAYERS))
                seconds.setdefault(f"{name} left", []).append(left)
    return {name: passes[1:] for name, passes in seconds.items()}


def _cases(seconds: dict[str, list[float]], parts: int, hidden: int, rows: int) -> Iterator[Case]:
    """Yield what the S-rank measured: links against plain loops, and both links; then the other plain loops."""
    shape, rows = _shape(hidden), _rounded(rows, parts)
    label = f"{parts} R-ranks, {rows} rows of {hidden}: "
    size = rows * (shape.row_columns + shape.out_columns) * 2 / 1e9

    def against(name: str, reference: str) -> Case:
        ratios = [b / a for a, b in zip(seconds[name], seconds[reference], strict=True)]
        return case(label + name, [size / s for s in seconds[name]], "GB/s", reference, ratios)

    for name, raw in LINKS.items():
        yield against(name, raw)
        extra = [(a - b) * 1e6 / (2 * parts) for a, b in zip(seconds[name], seconds[raw], strict=True)]
        ratios = [a / b for a, b in zip(seconds[name], seconds[raw], strict=True)]
        yield case(f"{label}software of {name}", extra, "us a message", f"time of {raw}", ratios)
        if left := seconds.get(f"{name} left"):
            ratios = [a / b for a, b in zip(left, seconds[name], strict=True)]
            yield case(f"{label}{name} left after a slice", [s * 1e6 for s in left], "us", f"time of {name}", ratios)
    yield against("collective", "messages")
    for name in seconds:
        if name.startswith("raw ") and name != "raw messages":
            yield against(name, "raw messages")


def _shape(hidden: int) -> LayerShape:
    heads, kv_heads, dim = SHAPES[hidden]
    return LayerShape(kv_heads, dim, dim, heads, dim**-0.5)


def _rounded(rows: int, parts: int) -> int:
    """Return `rows`, or a little more: the same number on every R-rank."""
    return -(-rows // parts) * parts


class _Computing:
    """Stands for a slice of an S-rank of about so many seconds: GEMMs, and no call of MPI."""

    def __init__(self, seconds: float) -> None:
        self._x, self._weights, self._out = torch.randn(4, 512), torch.randn(512, 512), torch.empty(4, 512)
        self._count = 20
        self._count = max(1, round(20 * seconds / min(seconds_of(self) for _ in range(3))))

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._x, self._weights, out=self._out)


def _pass(comm: MPI.Intracomm, one_round: Callable[[], None]) -> float:
    """Return the seconds of an exchange, the mean of a pass."""
    gather_all(comm, 0, int)
    one_round()
    start = perf_counter()
    for _ in range(LAYERS):
        one_round()
    return (perf_counter() - start) / LAYERS


def _echo(shape: LayerShape) -> Callable[[NDArray[np.uint8], NDArray[np.uint8]], Callable[[], object]]:
    """Return what makes an R-rank's work over its buffers: the first columns of every row go back."""

    def make(there: NDArray[np.uint8], back: NDArray[np.uint8]) -> Callable[[], object]:
        rows, out = (torch.from_numpy(data).view(torch.bfloat16) for data in (there, back))
        first = rows.view(-1, shape.row_columns)[:, : shape.out_columns]
        return partial(out.view(-1, shape.out_columns).copy_, first)

    return make
