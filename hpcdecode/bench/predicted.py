"""Jobs predicted and run, close together, on all ranks that this module is started on: see `bench/planner.py`.

The model is loaded once. Between passes of the calibration every case is run; predictions are made in the end from all
passes. The S-rank prints a Predictions as JSON.
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

from hpcdecode.config import EngineOptions, Job
from hpcdecode.generate import generate
from hpcdecode.model import SplitModel, load_split
from hpcdecode.planning import layouts, lengths
from hpcdecode.planning.calibrate import Calibration
from hpcdecode.planning.layout_planner import choose_layout
from hpcdecode.planning.planner import MeanRows
from hpcdecode.planning.profile import Profile
from hpcdecode.planning.simulator import SimulatedGroups, lane_limits, simulate
from hpcdecode.ranks import launch
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.auto import FULL, load_limit
from hpcdecode.schedule.limits import prefill_limit

_CAPACITY = 1 << 40  # more than any case takes


class PredictedCase(msgspec.Struct, frozen=True):
    """Rows, and how they are run.

    Attributes:
        rows: Number of rows.
        prompt: Fewest and most prompt tokens.
        new: Fewest and most generated tokens.
        batch: B of a group.
        period: F.
        schedule: Name of the schedule.
        layout: `split` into one S-rank and R-ranks, or `replicas`, as which one process counts.
        lanes: Of a group; None for as many as jobs have.
        tp: S-ranks of a group. Split, all of them are of one group, and each has as many R-ranks.
    """

    rows: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    batch: int
    period: int
    schedule: str = "fixed-f"
    layout: str = "split"
    lanes: int | None = None
    tp: int = 1

    def __str__(self) -> str:
        (a, b), (c, d) = self.prompt, self.new
        lanes = f", {self.lanes} lanes" * (self.lanes is not None)
        sizes = f"B {self.batch}, F {self.period}{lanes}"
        layout = f"{self.layout} of tp {self.tp}" if self.tp > 1 else self.layout
        return f"{layout}: {self.rows} rows of {a}-{b} + {c}-{d}, {sizes}, {self.schedule}"

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


def predict(profile: Profile, case: PredictedCase) -> tuple[float, int]:
    """Return tokens/s and the peak of the load by the simulator."""
    own = case.lengths()
    prompt, new = ([row[i] for row in own] for i in (0, 1))
    steps, alone = max(new) - 1, case.layout == "replicas"
    load = load_limit(case.batch, case.period, steps, sum(prompt) / len(prompt), _CAPACITY)
    lanes = case.lanes or (1 if alone else 2)
    limits = lane_limits(case.batch, case.period, steps, lanes, load, case.schedule, prefill_limit(not alone))
    cost = profile.alone if alone else profile.cost
    assert cost is not None, "replicas are measured"
    parts, count = (1, profile.ranks // case.tp) if alone else (profile.ranks // case.tp - 1, 1)
    groups = SimulatedGroups(profile.of_member(cost, case.tp), [_CAPACITY] * parts, limits, count=count)
    outcome = simulate([groups], lengths.of(prompt, new))
    return outcome.tokens_per_second, outcome.peak_load


class Runner:
    """Runs cases on all ranks of a team; every rank makes the same calls.

    Args:
        team: The ranks.
        model: Loaded before.
        directory: Of the model.
        folder: For prompts and results.
    """

    def __init__(self, team: Team, model: SplitModel, directory: Path, folder: Path):
        self.team, self.model, self.directory, self.folder = team, model, directory, folder

    def run(self, case: PredictedCase) -> tuple[float, int]:
        """Run a job; return tokens/s and the peak of the load on the lead, 0 on the others."""
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
            layout=case.layout,
            prompts=(str(rows),),
            output=str(out),
            overwrite=True,
            params=SamplingParams(ignore_eos=True),
            batch=case.batch,
            period=case.period,
            schedule=case.schedule,
            lanes=case.lanes,
            tp=case.tp if case.tp > 1 else None,
        )
        with contextlib.redirect_stderr(io.StringIO()):
            generate(job, self.team.comm, model=self.model if case.tp == 1 else None)  # members read their parts
        if not self.team.lead:
            return 0.0, 0
        with h5py.File(out) as file:
            figures = json.loads(file.attrs["summary"])
        return figures["tokens_per_second"], figures["peak_load_tokens"]


class Predictions(msgspec.Struct):
    """What was predicted and measured.

    Attributes:
        found: By the text of every case.
        choice: Text of the planner's choice for the rows of the first case; None if it was not asked.
    """

    found: dict[str, Found]
    choice: str | None


def main(directory: str, folder: str, rounds: int, cases: list[PredictedCase], choosing: bool) -> Predictions | None:
    """Calibrate, run and predict; return the predictions on the lead, None on the other ranks.

    Args:
        directory: Of the model.
        folder: For prompts and results.
        rounds: Runs of every case.
        cases: What is run.
        choosing: Add the planner's choice for the rows of the first case.
    """
    team = assemble(launch.connect())
    team.pin()
    model = load_split(directory, dtype="bfloat16")
    calibration = Calibration(team, model, directory, None)
    runner = Runner(team, model, Path(directory), Path(folder))
    calibration.measure()
    if team.comm is not None:
        calibration.measure_sums(team.comm)
        if any(case.tp > 1 for case in cases):
            calibration.measure_groups(team.comm, EngineOptions(model=directory, dtype="bfloat16"), rounds)
    choice = team.broadcast([chosen(calibration.profile(), cases)] if choosing else [], list[PredictedCase])
    runs: dict[PredictedCase, list[tuple[float, int]]] = {case: [] for case in (*cases, *choice)}
    for _ in range(rounds):
        for case in runs:
            runs[case].append(runner.run(case))
        calibration.measure()
    if not team.lead:
        return None
    profile = calibration.profile()
    found = {}
    for case, own in runs.items():
        speed, load = predict(profile, case)
        found[str(case)] = Found(speed, [rate for rate, _ in own], load, own[0][1])
    return Predictions(found, str(choice[0]) if choice else None)


def chosen(profile: Profile, cases: list[PredictedCase]) -> PredictedCase:
    """Return the first case with the planner's layout, B, F and lanes, given room for the largest load of all cases."""
    own = cases[0].lengths()
    prompt, new = (sum(row[i] for row in own) / len(own) for i in (0, 1))
    rows = MeanRows(prompt, new - 1, len(own))
    capacity = int(max(case.batch * (rows.prompt + (rows.steps + case.period) / 2) for case in cases) / FULL) + 1
    parts = max(profile.ranks - 1, 1)
    possible = [layouts.replicas(layouts.RanksAlike("", profile.ranks, profile.alone, capacity, capacity))]
    if profile.ranks > 1:
        possible.append(layouts.split(profile.cost, -(-capacity // parts), 1, parts))
    best = choose_layout([one for one in possible if one], rows)[0]
    group, alone = best.groups[0], best.layout.parts[0].r_ranks == 0
    return msgspec.structs.replace(
        cases[0],
        batch=group.batch,
        period=group.rows.period,
        layout="replicas" if alone else "split",
        lanes=group.lanes,
    )


if __name__ == "__main__":
    cases = msgspec.json.decode(sys.argv[4], type=list[PredictedCase])
    report = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), cases, sys.argv[5] == "choose")
    if report is not None:
        print(msgspec.json.encode(report).decode())
