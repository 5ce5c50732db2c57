"""Run by mpiexec: lanes between rank 0 and the others, with and without shared memory, whole and in pieces.

Every R-rank answers with the first columns of q, in a multiple of its rank, and adds up what it is given of prompts.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
import torch
from mpi4py import MPI

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.collective import CollectiveRLink, CollectiveSLink, Trial
from hpcdecode.exchange.memory import LaneMemory, LaneSpec, shared_bytes
from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.mpi.collectives import gather_all
from hpcdecode.mpi.wait import wait
from hpcdecode.ranks import launch
from hpcdecode.schedule.plan import Plan

WORLD = MPI.COMM_WORLD
R_RANKS = WORLD.size - 1
SHAPES = [LayerShape(2, 4, 4, 4, 1.0), LayerShape(1, 4, 8, 4, 1.0)]  # the second: v wider than k
SLOTS = 40


def plans() -> list[Plan]:
    """Uneven shares, prompts with and without decode rows, an R-rank without work, and the end."""
    draw = np.random.default_rng(1)
    owners = [draw.integers(0, R_RANKS, n) for n in (17, 1, 0, 30)]
    tables = [np.array([(r, i) for i, r in enumerate(ranks)], np.int32).reshape(-1, 2) for ranks in owners]
    prompts = [[(0, 31, 0, 5)], [], [(R_RANKS - 1, 32, 0, 9), (0, 33, 9, 2)], []]
    shifted = [
        np.array([(r, s, first + len(table), n) for r, s, first, n in rows], np.int32).reshape(-1, 4)
        for table, rows in zip(tables, prompts, strict=True)
    ]
    made = [Plan(i, decode=d, prefill=p) for i, (d, p) in enumerate(zip(tables, shifted, strict=True))]
    made += [Plan(i, decode=made[0].decode) for i in range(len(made), len(made) + 20)]  # all have rows, most likely
    return [*made, Plan(len(made), stop=True)]


def serve_s(link: MpiSLink, layers: int) -> float:
    """Returns the sum of all prompt rows that were sent."""
    sent, generator = 0.0, torch.Generator().manual_seed(0)
    for plan in plans():
        link.send_plan(plan)
        for layer in range(layers if plan.runs_model else 0):
            shape, tokens = SHAPES[layer], plan.decode_tokens + plan.prefill_tokens
            qkv = torch.randn(tokens, shape.row_columns, generator=generator)
            q, k, v = qkv.split([shape.q_columns, shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim], dim=1)
            if layer:  # not side by side
                q, k, v = q.clone(), k.clone(), v.clone()
            o = torch.full((tokens, shape.out_columns), -7.0)
            link.send_rows(layer, (q, k, v), o)
            wait(link)
            link.recv_output()
            check(o, qkv, plan)
            for rank, _, first, count in plan.prefill.tolist():
                sent += (rank + 1) * float(qkv[first : first + count, shape.q_columns :].double().sum())
    return sent


def check(o: torch.Tensor, qkv: torch.Tensor, plan: Plan) -> None:
    n = plan.decode_tokens
    ranks = torch.from_numpy(plan.decode[:, 0].astype(np.float32))[:, None] + 1
    repeated = qkv.repeat(1, 3)[:n, : o.shape[1]]
    assert torch.equal(o[:n], repeated * ranks)
    assert (o[n:] == -7).all()


class Late:
    """A mark of a device that is done after some tests."""

    def __init__(self, tests: int):
        self.tests = tests

    def Test(self) -> bool:
        self.tests -= 1
        return self.tests < 0


def serve_r(link: MpiRLink, layers: int) -> float:
    """Returns the sum of all prompt rows that came, times this rank."""
    came = 0.0
    while True:
        wait(link.recv_plan())
        if link.take_plan().stop:
            return came
        for layer in range(layers):
            for request, message in link.recv_rows(layer):
                wait(request)
                wait(link.while_waiting(Late(3)))
                message.out.copy_(message.rows.repeat(1, 3)[:, : message.out.shape[1]] * WORLD.rank)
                came += WORLD.rank * float(message.prompts.double().sum())
                link.send_output(message)


class HalfShared:
    """Only R-ranks with odd numbers share memory with the S-rank, as if the others were elsewhere."""

    def __enter__(self) -> None:
        self._enough = LaneMemory._enough
        if WORLD.rank % 2 == 0:
            LaneMemory._enough = lambda *_: False

    def __exit__(self, *_: object) -> None:
        LaneMemory._enough = self._enough


def s_link(spec: LaneSpec, way: str | None) -> MpiSLink:
    if way is None:
        return MpiSLink(WORLD.Dup(), spec)
    return CollectiveSLink(WORLD.Dup(), spec, Trial(0) if way == "trial" else None)


def r_link(spec: LaneSpec, way: str | None) -> MpiRLink:
    return MpiRLink(WORLD.Dup(), spec) if way is None else CollectiveRLink(WORLD.Dup(), spec)


def main() -> int:
    ways = [(*case, None) for case in ((2, 16, 1), (2, 16, 3), (2, None, 1), (2, None, 4), (1, 0, 2))]
    ways += [(2, 16, 3, "collective"), (2, None, 1, "collective"), (2, None, 2, "trial"), (2, 16, 3, "mixed")]
    for layers, prefill, pieces, way in ways:
        none = prefill is None  # no shared memory: everything goes by message
        shared = (0, 0) if none else shared_bytes(SHAPES, 20, prefill, torch.float32)  # of 30 rows: too little for all
        spec = LaneSpec(SHAPES[:layers], SLOTS, torch.float32, Partition("request", R_RANKS), shared, pieces)
        with HalfShared() if way == "mixed" else nullcontext():
            link = r_link(spec, way) if WORLD.rank else s_link(spec, way)
        figure = (serve_r if WORLD.rank else serve_s)(link, layers)
        link.close()
        sent, *came = gather_all(WORLD, figure, float)
        assert abs(sent - sum(came)) < 1e-3 * max(abs(sent), 1.0), (sent, came)
    if WORLD.rank == 0:
        print("LINKS ok")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        launch.abort(WORLD, error)
