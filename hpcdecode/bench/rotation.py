"""`hpcdecode bench rotation`: rows whose K and V exceed memory, by schedule and tier, measured and simulated.

Jobs of one process run the same rows in turn: with `--admission reserve`, with `--schedule static`, as vLLM does (rows
enter by what is expected of them, are preempted, and are computed again: `--admission optimistic`), and with
`--schedule fluid` over each tier. Their tokens are compared. Costs are measured before, between and after them. The
value is tokens/s as measured, the ratio what the simulator predicts over that. On a GPU nothing is predicted: there the
ratio is over `--admission reserve`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch

from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.workload import default_folder
from hpcdecode.config import Job
from hpcdecode.errors import InvariantViolation, UserError
from hpcdecode.generate import generate
from hpcdecode.model import SplitModel, load_split
from hpcdecode.planning.calibrate import Calibration
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_simulator import simulate_job
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.outcome import SimulationOutcome
from hpcdecode.planning.simulator import lane_limits
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.planning.tiered import TieredMemory, job_group
from hpcdecode.ranks.team import assemble
from hpcdecode.report.benchmark import case, machine
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.model_path import find_model
from hpcdecode.system.swap_tiers import TierSpec

_STEPS = 4  # of each load that is measured
_VOCABULARY = 4000  # token ids of prompts, above the special ones


class Contender(NamedTuple):
    """How rows are run.

    Attributes:
        name: As printed.
        schedule: Of the job.
        admission: Of the job.
        batch: B.
        tier: Text of its tier, or nothing.
    """

    name: str
    schedule: str
    admission: str
    batch: int
    tier: str = ""


class Ran(NamedTuple):
    """What a job did.

    Attributes:
        tokens: Of every row.
        summary: Figures of its results.
    """

    tokens: list[list[int]]
    summary: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--model", default="demo", metavar="MODEL", help="as --model of generate (%(default)s)")
    add("--rows", type=int, default=48, metavar="N", help="number of rows (%(default)s)")
    add("--resident", type=int, default=12, metavar="N", help="rows that memory has room for (%(default)s)")
    add("--prompt", type=int, default=60, metavar="N", help="prompt tokens of a row (%(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="most new tokens of a row (%(default)s)")
    add("--stops", type=float, default=0.0, metavar="X", help="share of all tokens that end a row (%(default)s)")
    add("--tier", nargs="+", default=["host"], metavar="TIER", help="host, host@RATE, or a directory for a file")
    add("--kv-dtype", default="float32", help="data type of the KV cache (%(default)s)")
    add("--dtype", default="bfloat16", help="data type of weights and activations (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what has weights and KV cache (%(default)s)")
    add("--rounds", type=int, default=2, metavar="N", help="runs of each (%(default)s)")
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="prompts and results (%(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Run the benchmark.

    Raises:
        UserError: If memory has room for all rows, or a directory for a tier is missing.
    """
    if not 0 < args.resident < args.rows:
        raise UserError(f"--resident: expected 1 to {args.rows - 1} rows, got {args.resident}")
    for tier in args.tier:
        kind = tier.partition("@")[0]
        if kind != "host" and not Path(kind).is_dir():
            raise UserError(f"--tier {tier}: expected host, host@RATE or a directory, found none; create it")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: expected a GPU that torch sees, found none; leave out --device")
    args.work.mkdir(parents=True, exist_ok=True)
    bench = _Bench(args)
    runs: dict[Contender, list[Ran]] = {each: [] for each in bench.contenders()}
    bench.measure()
    for _ in range(args.rounds):
        for each, ran in runs.items():
            ran.append(bench.run(each))
        bench.measure()
    _require_same(runs)
    cases = bench.predictions(runs) if args.device == "cpu" else _against_the_first(runs)
    return {"bench": "rotation", "machine": machine(), "cases": cases}


def _against_the_first(runs: dict[Contender, list[Ran]]) -> list[Case]:
    """Return tokens/s, and their ratio to those of the first contender, run by run."""
    cases: list[Case] = []
    first: list[float] = []
    for each, ran in runs.items():
        measured = [one.summary["tokens_per_second"] for one in ran]
        first = first or measured
        ratios = [rate / base for rate, base in zip(measured, first, strict=True)]
        cases.append(case(f"{each.name}{_moved(ran[-1])}", measured, "tokens/s", "over reserve", ratios))
    return cases


class _Bench:
    """The rows, and what runs and simulates them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.directory = args, find_model(args.model, {})
        self.model: SplitModel = load_split(self.directory, dtype=args.dtype, device=torch.device(args.device))
        self.layers = list(self.model.attends)
        whole = TieredMemory(self.layers, args.kv_dtype, 0, [], False)
        tokens = -(-(args.prompt + args.max_tokens) // whole.block_tokens) * whole.block_tokens
        self.kv = int(args.resident * tokens * whole.token_bytes)
        self.all_kv = int(1.25 * args.rows * tokens * whole.token_bytes)
        if args.device == "cpu":
            self._calibrate()
        self._write_rows()

    def _calibrate(self) -> None:
        args, team = self.args, assemble(None)
        team.pin()
        batches = dict.fromkeys((4, args.resident, args.rows))
        loads = [SteadyLoad(batch, 1, args.prompt, _STEPS) for batch in batches]
        loads += [SteadyLoad(args.resident, 1, context, _STEPS) for context in (4 * args.prompt,)]
        loads += [SteadyLoad(args.resident, 1, args.prompt, _STEPS, prompt=n, chunk=n // 5) for n in (160, 640)]
        self.threads = team.me.threads
        self.calibration = Calibration(team, self.model, self.directory, args.kv_dtype, loads=loads)

    def measure(self) -> None:
        """Measure what steps take, which predictions are made of."""
        if self.args.device == "cpu":
            self.calibration.measure()

    def predictions(self, runs: dict[Contender, list[Ran]]) -> list[Case]:
        """Return tokens/s, and what the simulator predicts over these."""
        cost, cases = self.calibration.profile().cost, []
        for each, ran in runs.items():
            outcome = self.simulate(each, cost, [len(tokens) for tokens in ran[0].tokens])
            measured = [one.summary["tokens_per_second"] for one in ran]
            ratios = [outcome.tokens_per_second / rate for rate in measured]
            name = f"{each.name}{_moved(ran[-1], outcome)}"
            cases.append(case(name, measured, "tokens/s", "predicted / measured", ratios))
        return cases

    def contenders(self) -> list[Contender]:
        """Return how the rows are run."""
        args = self.args
        found = [
            Contender("reserve", "fixed-f", "reserve", args.rows),
            Contender("static", "static", "reserve", args.resident),
            Contender("vllm (optimistic, computed again)", "fixed-f", "optimistic", args.rows),
        ]
        for tier in args.tier:
            kind, at, rate = tier.partition("@")
            where = "host" if kind == "host" else f"nvme:{kind}"
            found.append(Contender(f"fluid, {tier}", "fluid", "reserve", args.rows, f"{where}:{self.all_kv}{at}{rate}"))
        return found

    def run(self, how: Contender) -> Ran:
        """Run the rows."""
        out = self.args.work / "rotation.h5"
        job = Job(
            model=self.directory,
            device=self.args.device,
            r_device=self.args.device,
            dtype=self.args.dtype,
            kv_dtype=self.args.kv_dtype,
            prompts=(str(self.args.work / "rotation.jsonl"),),
            output=str(out),
            overwrite=True,
            params=SamplingParams(max_tokens=self.args.max_tokens, ignore_eos=True),
            batch=how.batch,
            period=1,
            schedule=how.schedule,
            admission=how.admission,
            prefix_sharing=False,
            kv_memory=self.kv,
            kv_swap=(how.tier,) if how.tier else (),
        ).check()
        with contextlib.redirect_stderr(io.StringIO()):
            generate(job, model=self.model)
        with h5py.File(out) as file:
            order, ends = file["rows/line"][:].argsort(), file["rows/token_offsets"][:]
            tokens = [file["rows/token_ids"][ends[i] : ends[i + 1]].tolist() for i in order]
            return Ran(tokens, json.loads(file.attrs["summary"]))

    def simulate(self, how: Contender, cost: Cost, lengths: list[int]) -> SimulationOutcome:
        """Return what the simulator predicts for rows of these lengths."""
        rows, most = len(lengths), self.args.max_tokens
        prompt = np.full(rows, self.args.prompt)
        tiers = [TierSpec.parse(how.tier)] if how.tier else []
        memory = TieredMemory(self.layers, self.args.kv_dtype, self.kv, tiers, bool(tiers), self.threads, here=True)
        load = memory.capacity()
        limits = lane_limits(how.batch, 1, most - 1, 1, load, how.schedule, prefill_limit(False))
        group = job_group(memory, cost, limits, 0, how.admission, memory.speeds())
        return simulate_job(group, Lengths(prompt, np.array(lengths), np.full(rows, most), np.zeros(rows)))

    def _write_rows(self) -> None:
        draw = random.Random(0)
        stops = draw.sample(range(5, _VOCABULARY), int(self.args.stops * _VOCABULARY))
        with open(self.args.work / "rotation.jsonl", "w") as file:
            for seed in range(self.args.rows):
                ids = [draw.randrange(5, 900) for _ in range(self.args.prompt)]
                row = {"prompt_token_ids": ids, "seed": seed, "temperature": 1.0, "stop_token_ids": stops}
                file.write(json.dumps(row) + "\n")


def _require_same(runs: dict[Contender, list[Ran]]) -> None:
    """Raise InvariantViolation unless all runs have the same tokens."""
    every = [ran.tokens for each in runs.values() for ran in each]
    if any(tokens != every[0] for tokens in every):
        raise InvariantViolation("tokens do not depend on schedule, admission or tier", "runs differ")


def _moved(ran: Ran, outcome: SimulationOutcome | None = None) -> str:
    """Return what was moved and preempted, and what was simulated of that, if it was."""
    moved, preempted = ran.summary["swap_in_bytes"], ran.summary["preemptions"]
    bytes_in = f" (simulated {outcome.swap_in_bytes / 1e6:,.0f})" if outcome else ""
    times = f" (simulated {outcome.preemptions})" if outcome else ""
    said = f", {moved / 1e6:,.0f} MB in{bytes_in}" if moved else ""
    return said + (f", {preempted:.0f} preemptions{times}" if preempted else "")
