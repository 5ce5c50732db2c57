"""Jobs predicted and run, close together: `mpiexec -n N python -m hpcdecode.perf.predicted MODEL FOLDER ROUNDS CASES`.

The model is loaded once. Every round is a pass of the calibration and a run of every case; predictions are made in the
end from all passes. Rank 0 prints a JSON object, case by case: predicted and measured tokens/s.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path

import h5py
import msgspec

from hpcdecode import launch
from hpcdecode.generate import generate
from hpcdecode.job import Job
from hpcdecode.model import SplitModel, load_split
from hpcdecode.perf import lengths
from hpcdecode.perf.calibrate import Calibration
from hpcdecode.perf.cost import Cost
from hpcdecode.perf.simulator import World, simulate
from hpcdecode.sampling.params import SamplingParams
from hpcdecode.schedule.auto import load_limit, split
from hpcdecode.schedule.limits import Limits

_CAPACITY = 1 << 40  # more than any case takes


class Case(msgspec.Struct, frozen=True):
    """Rows of shortest to longest prompt tokens that generate fewest to most, and how they are run."""

    rows: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    batch: int
    period: int
    schedule: str = "fixed-f"

    def __str__(self) -> str:
        (a, b), (c, d) = self.prompt, self.new
        return f"{self.rows} rows of {a}-{b} + {c}-{d}, B {self.batch}, F {self.period}, {self.schedule}"

    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and new tokens of every row; the same for cases with the same rows."""
        draw = random.Random(f"{self.rows} {self.prompt} {self.new}")
        return [(draw.randint(*self.prompt), draw.randint(*self.new)) for _ in range(self.rows)]


class Found(msgspec.Struct):
    """tokens/s, and the peak of the load, tokens."""

    predicted: float
    measured: list[float]
    predicted_load: int
    measured_load: int


def predict(cost: Cost, case: Case, r_ranks: int, lanes: int) -> tuple[float, int]:
    """By the simulator: tokens/s and the peak of the load."""
    own = case.lengths()
    prompt, new = ([row[i] for row in own] for i in (0, 1))
    steps = max(new) - 1
    load = load_limit(case.batch, case.period, steps, sum(prompt) / len(prompt), _CAPACITY)
    limits = [
        Limits(b, case.period, steps, 512, None, 0, case.schedule, load * b // case.batch)
        for b in split(case.batch, lanes)
    ]
    outcome = simulate(World(cost, [_CAPACITY] * r_ranks, limits), lengths.of(prompt, new))
    return outcome.tokens_per_second, outcome.peak_load


class Runner:
    """Runs cases on all ranks of a team."""

    def __init__(self, team: launch.Team, model: SplitModel | None, directory: Path, folder: Path):
        self.team, self.model, self.directory, self.folder = team, model, directory, folder

    def run(self, case: Case) -> tuple[float, int]:
        """Tokens/s and the peak of the load, on the lead; 0 on the others."""
        rows, out = self.folder / "planner.jsonl", self.folder / "planner.h5"
        if self.team.lead:
            draw = random.Random(0)
            lines = (
                {"prompt_token_ids": [draw.randrange(4, 1000) for _ in range(prompt)], "max_tokens": new}
                for prompt, new in case.lengths()
            )
            rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.team.gather_all(0, int)
        job = Job(
            model=str(self.directory),
            dtype="bfloat16",
            prompts=(str(rows),),
            output=str(out),
            overwrite=True,
            params=SamplingParams(ignore_eos=True),
            batch=case.batch,
            period=case.period,
            schedule=case.schedule,
        )
        with contextlib.redirect_stderr(io.StringIO()):
            generate(job, self.team.comm, model=self.model)
        if not self.team.lead:
            return 0.0, 0
        with h5py.File(out) as file:
            figures = json.loads(file.attrs["summary"])
        return figures["tokens_per_second"], figures["peak_load_tokens"]


def main(directory: str, folder: str, rounds: int, cases: list[Case]) -> dict[str, Found] | None:
    """By case, on the lead. rounds: of a pass of the calibration and a run of each case."""
    team = launch.assemble(launch.connect(), 1)
    team.pin()
    model = load_split(directory, dtype="bfloat16") if team.lead else None
    calibration = Calibration(team, model, directory, None)
    runner = Runner(team, model, Path(directory), Path(folder))
    runs: dict[Case, list[tuple[float, int]]] = {case: [] for case in cases}
    for _ in range(rounds):
        calibration.measure()
        for case in cases:
            runs[case].append(runner.run(case))
    calibration.measure()
    if not team.lead:
        return None
    cost = calibration.profile().cost
    found = {}
    for case, own in runs.items():
        speed, load = predict(cost, case, len(team.r_ranks), 1 if team.comm is None else 2)
        found[str(case)] = Found(speed, [rate for rate, _ in own], load, own[0][1])
    return found


if __name__ == "__main__":
    result = main(*sys.argv[1:3], int(sys.argv[3]), msgspec.json.decode(sys.argv[4], type=list[Case]))
    if result is not None:
        print(msgspec.json.encode(result).decode())
