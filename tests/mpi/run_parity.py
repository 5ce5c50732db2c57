"""Run by mpiexec: every case over sub-worlds of several sizes, against the reference and against each other.

usage: run_parity.py DTYPE EXPECT WORLD:PERIOD:LANES[:PARTITION[:OVERLAP[:SCHEDULE[:EXCHANGE]]]],... CASE[=WORLD:...]...

PARTITION: of the attention over the R-ranks, or replicas, or sharing: replicas that have one copy of their weights.
    Or a group's members, such as tp2, pp2 or tp2pp2, which attend themselves; tp2-request and tp2-head have R-ranks.
    ep2 is tp2 with whole experts; rot2 are two copies of the model in rotation, as in rot2-request. pre1-request has a
    rank that only prefills beside one S-rank.
EXPECT: transformers, first-run (equal to the first of the runs), or same-schedule (to the first with its F and lanes).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from mpi4py import MPI

from hpcdecode.config import Job
from hpcdecode.generate import generate
from hpcdecode.model import load_split
from hpcdecode.mpi.collectives import broadcast, gather_all
from hpcdecode.ranks import node_memory
from hpcdecode.requests.params import SamplingParams
from tests.support.parity import generated

WORLD = MPI.COMM_WORLD
REPLICAS = ("replicas", "sharing", "")
GROUP = re.compile(r"(?:(tp|ep)(\d))?(?:pp(\d))?(?:rot(\d))?(?:pre(\d))?(?:$|-)(.*)")


def main(dtype: str, expect: str, runs: str, *cases: str) -> int:
    failures = 0
    for text in cases:
        path, _, own = text.partition("=")
        case = Path(path)
        model = load_split(case / "model", dtype=dtype) if WORLD.rank == 0 else None
        wait_for_all()
        results = {}
        for setting in (own or runs).split(","):
            tokens = run(case, model, dtype, *setting.split(":"))
            if tokens is not None:
                results[setting] = tokens
        if WORLD.rank == 0:
            failures += report(case, expect, results)
    return int(broadcast(WORLD, failures, int) > 0)


def run(
    case: Path,
    model,
    dtype: str,
    world: str,
    period: str,
    lanes: str,
    partition="request",
    overlap="1",
    schedule="fixed-f",
    exchange="auto",
):
    size = int(world)
    comm = WORLD.Split(0 if WORLD.rank < size else MPI.UNDEFINED)
    node_memory.COPIES_SHARE = 0.0 if partition == "sharing" else 1.0
    group = GROUP.match(partition)
    kind, tp, pp, copies, prefill, partition = group.groups() if group else (*[None] * 5, partition)
    if WORLD.rank < size:
        job = Job(
            prompts=(str(case / "prompts.jsonl"),),
            model=str(case / "model"),
            output=str(case / "out.h5"),
            params=SamplingParams(max_tokens=new_tokens(case), ignore_eos=True),
            dtype=dtype,
            batch=10,
            period=int(period),
            lanes=int(lanes),
            layout="replicas" if partition in REPLICAS else "split",
            partition="request" if partition in REPLICAS else partition,
            tp=int(tp) if tp else None,
            pp=int(pp or 1),
            ep=kind == "ep",
            s_ranks=int(copies) * int(tp or 1) if copies else None,
            prefill_ranks=int(prefill or 0),
            route="rotational" if copies else "fixed",
            overlap=int(overlap),
            schedule=schedule,
            exchange=exchange,
            prefill_tokens=256,
            kv_memory=64 << 20,
            overwrite=True,
        )
        code = generate(job, comm if size > 1 else None, model=None if tp or pp or copies or prefill else model)
        assert code == 0, code
    wait_for_all()
    return generated(case / "out.h5") if WORLD.rank == 0 else None


def wait_for_all() -> None:
    """Sleep until all ranks are here; collectives of MPI take the core of the one that is waited for."""
    gather_all(WORLD, 0, int)


def new_tokens(case: Path) -> int:
    return len(json.loads((case / "reference.json").read_text())[0])


def report(case: Path, expect: str, results: dict) -> int:
    """Print one line a run; returns how many differ from what they must equal."""
    failures = 0
    for setting, tokens in results.items():
        if expect == "transformers":
            expected = json.loads((case / "reference.json").read_text())
        elif expect == "first-run":
            expected = next(iter(results.values()))
        else:  # same-schedule
            schedule = setting.split(":")[1:3]
            expected = next(made for other, made in results.items() if other.split(":")[1:3] == schedule)
        wrong = [i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b]
        print(f"PARITY {case.name} {setting} {len(wrong)} rows differ {wrong}")
        failures += bool(wrong)
    return failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
